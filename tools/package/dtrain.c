/* The library, compiled once: the only source of what `make install`, CMakeLists.txt and meson.build build. Compile it
 * with -fvisibility=hidden: a shared library then exports the public functions and nothing else. */
#define DTRAIN_API extern __attribute__((__visibility__("default")))
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_MPI
#include "dtrain.h"
