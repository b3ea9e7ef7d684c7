/* ---- >>json-writer ----
 * Writes JSON (RFC 8259) into a bounded buffer, without allocating. These mistakes break the writer for good:
 *
 *   - a call in a wrong place: a value without its key, an end without its begin, more than 32 levels
 *   - a text that is not UTF-8, or a number that is not finite */
#ifndef DTRAIN__JSON_WRITER
#define DTRAIN__JSON_WRITER
#include "memory.c"

#define DTRAIN__JSON_DEPTH 32

static inline int dtrain__json_in(int byte, int low, int high)
{
    return byte >= low && byte <= high;
}

typedef struct dtrain__json_writer {
    unsigned char *out; /* may be NULL if capacity is 0: then the writer only counts */
    size_t capacity;
    size_t bytes; /* of the whole text; those beyond capacity are not written */
    int broken;
    int depth;
    uint32_t objects, filled; /* bit i: level i + 1 is an object; is not empty */
    int after_key, complete;
    int indent; /* spaces per level, with each item on its own line; 0: compact */
} dtrain__json_writer;

static void dtrain__json_write_start(dtrain__json_writer *writer, void *out, size_t capacity)
{
    memset(writer, 0, sizeof *writer);
    writer->out = (unsigned char *)out;
    writer->capacity = capacity;
}

/* Returns whether the text is one whole value and fits. It has writer->bytes bytes, without a terminator. */
static int dtrain__json_write_finish(const dtrain__json_writer *writer)
{
    return !writer->broken && writer->complete && writer->bytes <= writer->capacity;
}

static DTRAIN__NOINLINE void dtrain__json_put(dtrain__json_writer *writer, const void *text, size_t bytes)
{
    if (writer->bytes <= writer->capacity && bytes > 0) {
        size_t room = writer->capacity - writer->bytes;
        if (room > 0)
            memcpy(writer->out + writer->bytes, text, bytes < room ? bytes : room);
    }
    writer->bytes = bytes <= SIZE_MAX - writer->bytes ? writer->bytes + bytes : SIZE_MAX;
}

/* Starts a new line, unless the text is compact. */
static void dtrain__json_line(dtrain__json_writer *writer)
{
    if (writer->indent > 0)
        dtrain__json_put(writer, "\n", 1);
    for (int i = 0; i < writer->indent * writer->depth; i++)
        dtrain__json_put(writer, " ", 1);
}

/* Writes what goes before a key or value: a comma, a line. Returns 0 if it may not stand here. */
static int dtrain__json_place(dtrain__json_writer *writer, int is_key)
{
    uint32_t bit = writer->depth > 0 ? (uint32_t)1 << (writer->depth - 1) : 0;
    int in_object = (writer->objects & bit) != 0;
    if (writer->complete || (is_key ? !in_object || writer->after_key : in_object && !writer->after_key))
        writer->broken = 1;
    if (writer->broken)
        return 0;
    if ((writer->filled & bit) != 0 && !writer->after_key)
        dtrain__json_put(writer, ",", 1);
    if (writer->depth > 0 && !writer->after_key)
        dtrain__json_line(writer);
    writer->filled |= bit;
    writer->after_key = is_key;
    writer->complete = writer->depth == 0;
    return 1;
}

/* Opens an object or an array. */
static void dtrain__json_begin(dtrain__json_writer *writer, int is_object)
{
    if (writer->depth == DTRAIN__JSON_DEPTH)
        writer->broken = 1;
    if (!dtrain__json_place(writer, 0))
        return;
    uint32_t bit = (uint32_t)1 << writer->depth++;
    writer->objects = is_object ? writer->objects | bit : writer->objects & ~bit;
    writer->filled &= ~bit;
    writer->complete = 0;
    dtrain__json_put(writer, is_object ? "{" : "[", 1);
}

static void dtrain__json_end(dtrain__json_writer *writer)
{
    if (writer->depth == 0 || writer->after_key)
        writer->broken = 1;
    if (writer->broken)
        return;
    int in_object = (writer->objects >> --writer->depth & 1) != 0;
    if ((writer->filled >> writer->depth & 1) != 0)
        dtrain__json_line(writer);
    dtrain__json_put(writer, in_object ? "}" : "]", 1);
    writer->complete = writer->depth == 0;
}

/* Escapes only " and \ and characters below 0x20, as the reference implementation of safetensors does. */
static void dtrain__json_put_quoted(dtrain__json_writer *writer, const void *text, size_t length)
{
    static const char letters[] = "btn?fr", digits[] = "0123456789abcdef";
    const unsigned char *next = (const unsigned char *)text;
    size_t step = 0;
    dtrain__json_put(writer, "\"", 1);
    for (size_t at = 0; at < length; at += step) {
        char escape[6] = {'\\', 'u', '0', '0', '0', '0'};
        step = dtrain__utf8(next + at, length - at);
        if (step == 0) {
            writer->broken = 1;
            return;
        }
        int byte = next[at];
        int letter = byte == '"' || byte == '\\' ? byte : dtrain__json_in(byte, 8, 13) ? letters[byte - 8] : '?';
        if (byte >= 0x20 && byte != '"' && byte != '\\') {
            dtrain__json_put(writer, next + at, step);
            continue;
        }
        escape[1] = letter == '?' ? 'u' : (char)letter;
        escape[4] = digits[byte >> 4 & 15];
        escape[5] = digits[byte & 15];
        dtrain__json_put(writer, escape, letter == '?' ? 6 : 2);
    }
    dtrain__json_put(writer, "\"", 1);
}

static DTRAIN__NOINLINE void dtrain__json_write_key(dtrain__json_writer *writer, const void *text, size_t length)
{
    if (!dtrain__json_place(writer, 1))
        return;
    dtrain__json_put_quoted(writer, text, length);
    dtrain__json_put(writer, ": ", writer->indent > 0 ? 2 : 1);
}

static void dtrain__json_write_string(dtrain__json_writer *writer, const void *text, size_t length)
{
    if (dtrain__json_place(writer, 0))
        dtrain__json_put_quoted(writer, text, length);
}

static DTRAIN__NOINLINE void dtrain__json_write_word(dtrain__json_writer *writer, const char *word)
{
    if (dtrain__json_place(writer, 0))
        dtrain__json_put(writer, word, strlen(word));
}

static void dtrain__json_write_u64(dtrain__json_writer *writer, uint64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    dtrain__json_write_word(writer, text);
}

/* Puts a full stop in place of the locale's decimal point, which may be several bytes. */
static void dtrain__json_full_stop(char *number)
{
    size_t to = 0;
    for (size_t from = 0; number[from] != '\0'; from++) {
        char byte = number[from];
        int plain = dtrain__json_in(byte, '0', '9') || dtrain__json_in(byte, 'a', 'z') || byte == '+' || byte == '-';
        if (plain || to == 0 || number[to - 1] != '.')
            number[to++] = plain ? byte : '.';
    }
    number[to] = '\0';
}

/* Writes the fewest digits that read back as the same bits. Fast-math assumes that values are finite, so the bits are
 * checked. */
static void dtrain__json_write_double(dtrain__json_writer *writer, double value)
{
    char text[48];
    uint64_t bits, again_bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7ff) == 0x7ff) {
        writer->broken = 1;
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        double again = strtod(text, NULL);
        memcpy(&again_bits, &again, sizeof again_bits);
        if (again_bits == bits)
            break;
    }
    dtrain__json_full_stop(text);
    dtrain__json_write_word(writer, text);
}

static void dtrain__json_write_sizes(dtrain__json_writer *writer, const size_t *sizes, size_t count)
{
    dtrain__json_begin(writer, 0);
    for (size_t i = 0; i < count; i++)
        dtrain__json_write_u64(writer, sizes[i]);
    dtrain__json_end(writer);
}

/* ---- members of an object: keys and texts end with a zero byte ---- */

static DTRAIN__NOINLINE void dtrain__json_member(dtrain__json_writer *writer, const char *key)
{
    dtrain__json_write_key(writer, key, strlen(key));
}

static DTRAIN__NOINLINE void dtrain__json_member_u64(dtrain__json_writer *writer, const char *key, uint64_t value)
{
    dtrain__json_member(writer, key);
    dtrain__json_write_u64(writer, value);
}

/* Writes nanoseconds as microseconds, exactly. */
static DTRAIN__NOINLINE void dtrain__json_member_us(dtrain__json_writer *writer, const char *key, uint64_t ns)
{
    char text[32];
    snprintf(text, sizeof text, "%llu.%03u", (unsigned long long)(ns / 1000), (unsigned)(ns % 1000));
    dtrain__json_member(writer, key);
    dtrain__json_write_word(writer, text);
}

static DTRAIN__NOINLINE void dtrain__json_member_text(dtrain__json_writer *writer, const char *key, const char *text)
{
    dtrain__json_member(writer, key);
    dtrain__json_write_string(writer, text, strlen(text));
}

#endif
