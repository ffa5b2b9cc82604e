"""Print the flags that setuptools compiles C++ with for this Python, a line each."""

from __future__ import annotations

from setuptools._distutils.ccompiler import new_compiler
from setuptools._distutils.sysconfig import customize_compiler

compiler = new_compiler()
customize_compiler(compiler)
print("\n".join(compiler.compiler_so[1:]))
