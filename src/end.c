/* ---- >>end ---- */
DTRAIN__SMALL_END
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
