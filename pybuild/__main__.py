"""`python -m pybuild`."""

from pybuild.cli import main

if __name__ == "__main__":
    main()
