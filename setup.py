"""Builds the native CPU kernels; everything else of the package stands in pyproject.toml.

Each instruction set's kernels are one source, compiled with that set's flags, and the library
chooses when it is loaded: no `-march=native`, so that a wheel runs everywhere. Without a C++
compiler the build leaves the library out, and the torch executor serves.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("engine/kernels/cpu/csrc")

# Only `fma()` fuses a product with a sum: the compiler would do it in one loop and not in another.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
# The last two: GCC 12 warns of its own intrinsics (bug 105593).
FLAGS += ["-Wall", "-Wextra", "-pthread", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma"]
FLAGS_OF_SET = {"kernels_avx512": AVX512, "kernels_avx2": ["-mavx2", "-mfma"]}


SANITIZE = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
SANITIZE += ["-fno-sanitize-recover=all"]


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set."""

    user_options = [  # noqa: RUF012 - how setuptools wants it
        *build_ext.user_options,
        ("sanitize", None, "check memory and arithmetic while it runs (make test-sanitized)"),
    ]
    boolean_options = [*build_ext.boolean_options, "sanitize"]  # noqa: RUF012 - likewise

    def initialize_options(self) -> None:
        """Set what no option says."""
        super().initialize_options()
        self.sanitize = False

    def build_extension(self, ext: Extension) -> None:
        """Build the library; setuptools reports what fails and goes on, as it is optional."""

        extra = SANITIZE if self.sanitize else []

        def compile_one(source: str) -> list[str]:
            flags = FLAGS + FLAGS_OF_SET.get(Path(source).stem, []) + extra
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=ext.depends
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [one for each in pool.map(compile_one, ext.sources) for one in each]
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=["-pthread", *extra], target_lang="c++"
        )


def kernels() -> Extension:
    """Return the library of all instruction sets that this machine's architecture has."""
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    if platform.machine() != "x86_64":
        sources = [path for path in sources if Path(path).stem not in FLAGS_OF_SET]
    headers = [*SOURCES.glob("*.h"), *SOURCES.glob("*.inl")]
    return Extension(
        "engine.kernels.cpu.native",
        sources,
        depends=sorted(map(str, headers)),
        language="c++",
        optional=True,
    )


setup(ext_modules=[kernels()], cmdclass={"build_ext": BuildKernels})
