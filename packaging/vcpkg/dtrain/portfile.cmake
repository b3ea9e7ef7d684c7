# An overlay port that builds the clone it stands in: vcpkg install dtrain --overlay-ports=packaging/vcpkg
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(VCPKG_BUILD_TYPE release) # a C library: programs of every build type link with it
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -DDTRAIN_TOOLS=OFF -DDTRAIN_CMAKEDIR=share/dtrain)
vcpkg_cmake_install()
vcpkg_fixup_pkgconfig()
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/dtrain")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
