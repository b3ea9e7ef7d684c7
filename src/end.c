/* ---- >>end ---- */
#ifndef DTRAIN__END
#define DTRAIN__END
#include "base/base.h"
DTRAIN__SMALL_END
DTRAIN__UNIT_END
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif
