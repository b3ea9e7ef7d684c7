"""Conan 2: conan create packaging/conan"""
import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class Dtrain(ConanFile):
    name = "dtrain"
    description = "Distributed training on threads, processes and hosts"
    license = "Unlicense OR MIT"
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False]}
    default_options = {"shared": False, "fPIC": True}
    implements = ["auto_shared_fpic"]
    languages = "C"

    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        header = load(self, os.path.join(self._root(), "dtrain.h"))
        self.version = ".".join(re.findall(r"^#define DTRAIN_VERSION_[MP][A-Z]* (\d+)$", header, re.M))

    def export_sources(self):
        for pattern in "dtrain.h", "dtrain_cuda.h", "CMakeLists.txt", "LICENSE", "tools/package/*":
            copy(self, pattern, self._root(), self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["DTRAIN_TOOLS"] = False
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        self.cpp_info.libs = ["dtrain"]
        self.cpp_info.set_property("cmake_target_name", "dtrain::dtrain")
        if self.settings.os == "Windows":
            self.cpp_info.system_libs = ["ws2_32"]
        elif self.settings.os in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["m", "pthread"] + (["dl"] if self.settings.os == "Linux" else [])
