/* ---- >>begin ----
 * A program that makes the API static uses some of it: what it leaves unused is no reason to warn. */
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
