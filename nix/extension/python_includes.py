"""Print the -I flags that setuptools adds for Python's headers, a line each. Standard library only.

The order is that of setuptools' build_ext: a virtual environment's own folder before its base's.
"""

from __future__ import annotations

import sys
import sysconfig

if sys.exec_prefix != sys.base_exec_prefix:
    print(f"-I{sys.exec_prefix}/include")
for name in dict.fromkeys([sysconfig.get_path("include"), sysconfig.get_path("platinclude")]):
    print(f"-I{name}")
