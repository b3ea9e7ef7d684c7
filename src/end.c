/* ---- >>end ---- */
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
