/* ---- >>json ----
 * A strict RFC 8259 reader. It returns one token at a time, and its input may be hostile. It neither allocates nor
 * recurses, never reads past the end and stops at its first error. It checks every string that it passes (UTF-8,
 * escapes, surrogate pairs). Texts have lengths, because \u0000 is a legal character. Callers check for duplicate
 * keys. */
#ifndef DTRAIN__JSON
#define DTRAIN__JSON
#include "json_writer.c"
DTRAIN__FAST_BEGIN

typedef enum dtrain__json_kind {
    DTRAIN__JSON_ERROR, /* the reader's error and offset say what and where */
    DTRAIN__JSON_END,   /* the value is complete, and only whitespace follows it */
    DTRAIN__JSON_NULL,
    DTRAIN__JSON_FALSE,
    DTRAIN__JSON_TRUE,
    DTRAIN__JSON_NUMBER,
    DTRAIN__JSON_STRING,
    DTRAIN__JSON_KEY, /* the next token is its value */
    DTRAIN__JSON_OBJECT,
    DTRAIN__JSON_OBJECT_END,
    DTRAIN__JSON_ARRAY,
    DTRAIN__JSON_ARRAY_END
} dtrain__json_kind;

typedef enum dtrain__json_expect {
    DTRAIN__JSON_WANT_VALUE,
    DTRAIN__JSON_WANT_VALUE_OR_END, /* after [ */
    DTRAIN__JSON_WANT_KEY,
    DTRAIN__JSON_WANT_KEY_OR_END, /* after { */
    DTRAIN__JSON_WANT_COMMA_OR_END
} dtrain__json_expect;

typedef enum dtrain__json_fault {
    DTRAIN__JSON_FAULT_SYNTAX,
    DTRAIN__JSON_FAULT_STRING, /* a control character, escape or surrogate */
    DTRAIN__JSON_FAULT_UTF8,
    DTRAIN__JSON_FAULT_DEPTH
} dtrain__json_fault;

typedef struct dtrain__json_reader {
    const unsigned char *text;
    size_t length;
    size_t offset;            /* of the next byte; after an error, of the wrong byte */
    const char *error;        /* a phrase that says what is wrong; NULL: no error yet */
    dtrain__json_fault fault; /* the kind of error */
    int depth;
    uint32_t objects; /* bit i: level i + 1 is an object */
    dtrain__json_expect expect;
} dtrain__json_reader;

typedef struct dtrain__json_token {
    dtrain__json_kind kind;
    int escaped;       /* 1: a string that contains an escape */
    size_t begin, end; /* where it is in the text; strings without their quotes */
} dtrain__json_token;

static void dtrain__json_open(dtrain__json_reader *reader, const void *text, size_t length)
{
    memset(reader, 0, sizeof *reader);
    reader->text = (const unsigned char *)text;
    reader->length = length;
    reader->expect = DTRAIN__JSON_WANT_VALUE;
}

static dtrain__json_kind dtrain__json_bad_as(dtrain__json_reader *reader, dtrain__json_fault fault, size_t offset,
                                             const char *error)
{
    reader->offset = offset;
    reader->error = error;
    reader->fault = fault;
    return DTRAIN__JSON_ERROR;
}

static dtrain__json_kind dtrain__json_bad(dtrain__json_reader *reader, size_t offset, const char *error)
{
    return dtrain__json_bad_as(reader, DTRAIN__JSON_FAULT_SYNTAX, offset, error);
}

/* Returns the byte at offset; -1 at the end. */
static int dtrain__json_peek(const dtrain__json_reader *reader, size_t offset)
{
    return offset < reader->length ? reader->text[offset] : -1;
}

/* Returns the value of the four hex digits at offset; -1 if there are none. */
static int32_t dtrain__json_hex4(const dtrain__json_reader *reader, size_t offset)
{
    int32_t value = 0;
    if (offset > reader->length || reader->length - offset < 4)
        return -1;
    for (size_t i = 0; i < 4; i++) {
        int byte = reader->text[offset + i];
        int digit = dtrain__json_in(byte, '0', '9')   ? byte - '0'
                    : dtrain__json_in(byte, 'a', 'f') ? byte - 'a' + 10
                    : dtrain__json_in(byte, 'A', 'F') ? byte - 'A' + 10
                                                      : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* Decodes the escape at offset into code. Returns its length in the text; 0 if it is wrong. */
static size_t dtrain__json_escape(const dtrain__json_reader *reader, size_t offset, uint32_t *code)
{
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    int letter = dtrain__json_peek(reader, offset + 1);
    if (letter != 'u') {
        const char *found = letter > 0 ? strchr(letters, letter) : NULL;
        *code = found != NULL ? (uint32_t)meanings[found - letters] : 0;
        return found != NULL ? 2 : 0;
    }
    int32_t first = dtrain__json_hex4(reader, offset + 2);
    if (first < 0 || dtrain__json_in(first, 0xdc00, 0xdfff))
        return 0;
    *code = (uint32_t)first;
    if (!dtrain__json_in(first, 0xd800, 0xdbff))
        return 6;
    if (dtrain__json_peek(reader, offset + 6) != '\\' || dtrain__json_peek(reader, offset + 7) != 'u')
        return 0;
    int32_t second = dtrain__json_hex4(reader, offset + 8);
    if (!dtrain__json_in(second, 0xdc00, 0xdfff))
        return 0;
    *code = 0x10000u + ((uint32_t)(first - 0xd800) << 10) + (uint32_t)(second - 0xdc00);
    return 12;
}

/* Returns the offset of a string's next byte that is not a plain ASCII character. It looks at eight bytes at once: such
 * bytes have their high bits set in `other`. A borrow may also set higher bits than the lowest of them. */
static size_t dtrain__json_plain(const dtrain__json_reader *reader, size_t offset)
{
    const unsigned char *text = reader->text;
    const uint64_t each = 0x0101010101010101u;
    for (; reader->length - offset >= 8; offset += 8) {
        uint64_t word = dtrain__load_le64(text + offset);
        uint64_t other = word | (word - each * 0x20) | ((word ^ each * '"') - each) | ((word ^ each * '\\') - each);
        other &= each * 0x80;
        if (other != 0)
            return offset + (size_t)__builtin_ctzll(other) / 8;
    }
    while (offset < reader->length && text[offset] >= 0x20 && text[offset] < 0x80 && text[offset] != '"' &&
           text[offset] != '\\')
        offset++;
    return offset;
}

/* Reads the string whose opening quote is at the reader's offset. */
static dtrain__json_kind dtrain__json_read_string(dtrain__json_reader *reader, dtrain__json_token *token)
{
    size_t at = reader->offset + 1;
    token->begin = at;
    for (;;) {
        at = dtrain__json_plain(reader, at);
        int byte = dtrain__json_peek(reader, at);
        size_t step = 0;
        uint32_t code;
        if (byte < 0)
            return dtrain__json_bad(reader, at, "the text ends inside a string");
        if (byte == '"')
            break;
        if (byte < 0x20)
            return dtrain__json_bad_as(reader, DTRAIN__JSON_FAULT_STRING, at, "a control character inside a string");
        token->escaped |= byte == '\\';
        if (byte == '\\')
            step = dtrain__json_escape(reader, at, &code);
        else
            step = dtrain__utf8(reader->text + at, reader->length - at);
        if (step == 0 && byte == '\\')
            return dtrain__json_bad_as(reader, DTRAIN__JSON_FAULT_STRING, at, "an escape that JSON does not have");
        if (step == 0)
            return dtrain__json_bad_as(reader, DTRAIN__JSON_FAULT_UTF8, at, "not UTF-8");
        at += step;
    }
    token->end = at;
    reader->offset = at + 1;
    return DTRAIN__JSON_STRING;
}

static inline size_t dtrain__json_digits(const dtrain__json_reader *reader, size_t offset)
{
    while (dtrain__json_in(dtrain__json_peek(reader, offset), '0', '9'))
        offset++;
    return offset;
}

static dtrain__json_kind dtrain__json_read_number(dtrain__json_reader *reader, dtrain__json_token *token)
{
    size_t at = reader->offset, begin;
    token->begin = at;
    at += dtrain__json_peek(reader, at) == '-';
    begin = at;
    at = dtrain__json_digits(reader, at);
    if (at == begin)
        return dtrain__json_bad(reader, at, "a number without digits");
    if (reader->text[begin] == '0' && at - begin > 1)
        return dtrain__json_bad(reader, begin, "a number with a leading zero");
    if (dtrain__json_peek(reader, at) == '.') {
        begin = at + 1;
        at = dtrain__json_digits(reader, begin);
        if (at == begin)
            return dtrain__json_bad(reader, at, "a fraction without digits");
    }
    if (dtrain__json_peek(reader, at) == 'e' || dtrain__json_peek(reader, at) == 'E') {
        int sign = dtrain__json_peek(reader, at + 1);
        begin = at + 1 + (sign == '+' || sign == '-');
        at = dtrain__json_digits(reader, begin);
        if (at == begin)
            return dtrain__json_bad(reader, at, "an exponent without digits");
    }
    token->end = reader->offset = at;
    return DTRAIN__JSON_NUMBER;
}

static dtrain__json_kind dtrain__json_read_word(dtrain__json_reader *reader, dtrain__json_token *token,
                                                const char *word, dtrain__json_kind kind)
{
    size_t bytes = strlen(word);
    token->begin = reader->offset;
    if (reader->length - reader->offset < bytes || memcmp(reader->text + reader->offset, word, bytes) != 0)
        return dtrain__json_bad(reader, reader->offset, "a word that JSON does not have");
    token->end = reader->offset += bytes;
    return kind;
}

static dtrain__json_kind dtrain__json_enter(dtrain__json_reader *reader, int is_object)
{
    if (reader->depth == DTRAIN__JSON_DEPTH)
        return dtrain__json_bad_as(reader, DTRAIN__JSON_FAULT_DEPTH, reader->offset, "nested deeper than 32 levels");
    uint32_t bit = (uint32_t)1 << reader->depth++;
    reader->objects = is_object ? reader->objects | bit : reader->objects & ~bit;
    reader->expect = is_object ? DTRAIN__JSON_WANT_KEY_OR_END : DTRAIN__JSON_WANT_VALUE_OR_END;
    reader->offset++;
    return is_object ? DTRAIN__JSON_OBJECT : DTRAIN__JSON_ARRAY;
}

static int dtrain__json_inside_object(const dtrain__json_reader *reader)
{
    return reader->depth > 0 && (reader->objects >> (reader->depth - 1) & 1) != 0;
}

/* Returns the offset of the next byte that is not whitespace. */
static inline size_t dtrain__json_space(const dtrain__json_reader *reader, size_t offset)
{
    for (; offset < reader->length; offset++) {
        int byte = reader->text[offset];
        if (byte > ' ' || (byte != ' ' && byte != '\t' && byte != '\n' && byte != '\r'))
            break;
    }
    return offset;
}

static dtrain__json_kind dtrain__json_read_value(dtrain__json_reader *reader, dtrain__json_token *token, int byte)
{
    static const char *const words[] = {"null", "false", "true"}; /* in the order of their kinds */
    reader->expect = DTRAIN__JSON_WANT_COMMA_OR_END;
    if (byte == '{' || byte == '[')
        return dtrain__json_enter(reader, byte == '{');
    if (byte == '"')
        return dtrain__json_read_string(reader, token);
    if (byte == '-' || dtrain__json_in(byte, '0', '9'))
        return dtrain__json_read_number(reader, token);
    for (int i = 0; i < 3; i++)
        if (byte == words[i][0])
            return dtrain__json_read_word(reader, token, words[i], (dtrain__json_kind)(DTRAIN__JSON_NULL + i));
    return dtrain__json_bad(reader, reader->offset, byte < 0 ? "the text ends before a value" : "not a value");
}

static dtrain__json_kind dtrain__json_read_key(dtrain__json_reader *reader, dtrain__json_token *token, int byte)
{
    if (byte != '"')
        return dtrain__json_bad(reader, reader->offset, "a key was expected");
    if (dtrain__json_read_string(reader, token) == DTRAIN__JSON_ERROR)
        return DTRAIN__JSON_ERROR;
    reader->offset = dtrain__json_space(reader, reader->offset);
    if (dtrain__json_peek(reader, reader->offset) != ':')
        return dtrain__json_bad(reader, reader->offset, "a colon was expected after a key");
    reader->offset++;
    reader->expect = DTRAIN__JSON_WANT_VALUE;
    return DTRAIN__JSON_KEY;
}

/* Reads the next token and its position. It checks only what must precede the token. */
static dtrain__json_kind dtrain__json_read(dtrain__json_reader *reader, dtrain__json_token *token)
{
    int in_object = dtrain__json_inside_object(reader);
    int after_value = reader->expect == DTRAIN__JSON_WANT_COMMA_OR_END;
    size_t at = dtrain__json_space(reader, reader->offset);
    int byte = dtrain__json_peek(reader, at);
    if (after_value && byte == ',' && reader->depth > 0) {
        reader->expect = in_object ? DTRAIN__JSON_WANT_KEY : DTRAIN__JSON_WANT_VALUE;
        at = dtrain__json_space(reader, at + 1);
        byte = dtrain__json_peek(reader, at);
        after_value = 0;
    }
    token->begin = token->end = reader->offset = at;
    if (after_value && reader->depth == 0)
        return byte < 0 ? DTRAIN__JSON_END : dtrain__json_bad(reader, at, "more text after the value");
    if (byte == (in_object ? '}' : ']') && reader->expect != DTRAIN__JSON_WANT_VALUE &&
        reader->expect != DTRAIN__JSON_WANT_KEY) {
        reader->depth--;
        reader->offset++;
        reader->expect = DTRAIN__JSON_WANT_COMMA_OR_END;
        return in_object ? DTRAIN__JSON_OBJECT_END : DTRAIN__JSON_ARRAY_END;
    }
    if (after_value)
        return dtrain__json_bad(reader, at, "a comma or the end of the list was expected");
    if (reader->expect == DTRAIN__JSON_WANT_KEY || reader->expect == DTRAIN__JSON_WANT_KEY_OR_END)
        return dtrain__json_read_key(reader, token, byte);
    return dtrain__json_read_value(reader, token, byte);
}

/* A fast path for the next whole number in an array without spaces, which may hold many millions. Returns 0 and reads
 * nothing if something else comes next. */
static inline int dtrain__json_further(dtrain__json_reader *reader, dtrain__json_token *token)
{
    size_t begin = reader->offset + 1;
    if (reader->expect != DTRAIN__JSON_WANT_COMMA_OR_END || reader->depth == 0 || dtrain__json_inside_object(reader) ||
        dtrain__json_peek(reader, begin - 1) != ',')
        return 0;
    size_t end = dtrain__json_digits(reader, begin);
    int after = dtrain__json_peek(reader, end);
    if (end == begin || (reader->text[begin] == '0' && end > begin + 1) || (after != ',' && after != ']'))
        return 0;
    token->begin = begin;
    token->end = reader->offset = end;
    return 1;
}

/* Reads the next token. After ERROR or END, further calls return the same. */
static dtrain__json_kind dtrain__json_next(dtrain__json_reader *reader, dtrain__json_token *token)
{
    token->begin = token->end = reader->offset;
    token->escaped = 0;
    token->kind = reader->error != NULL                 ? DTRAIN__JSON_ERROR
                  : dtrain__json_further(reader, token) ? DTRAIN__JSON_NUMBER
                                                        : dtrain__json_read(reader, token);
    if (token->kind == DTRAIN__JSON_OBJECT || token->kind == DTRAIN__JSON_ARRAY)
        token->end = reader->offset;
    return token->kind;
}

/* Reads to the end of the value that starts with token. Returns 0 on an error. */
static int dtrain__json_skip(dtrain__json_reader *reader, const dtrain__json_token *token)
{
    dtrain__json_token inner;
    if (token->kind == DTRAIN__JSON_OBJECT || token->kind == DTRAIN__JSON_ARRAY) {
        int outside = reader->depth - 1;
        while (reader->depth > outside)
            if (dtrain__json_next(reader, &inner) == DTRAIN__JSON_ERROR)
                return 0;
    }
    return reader->error == NULL;
}

static size_t dtrain__json_encode(uint32_t code, unsigned char out[4])
{
    size_t bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = bytes; i-- > 1; code >>= 6)
        out[i] = (unsigned char)(0x80 | (code & 0x3f));
    out[0] = (unsigned char)(lead[bytes] | code);
    return bytes;
}

/* Unescapes a STRING or KEY into out, without a terminator. Returns the length of the whole text. It never writes past
 * capacity; if the result is larger, out holds only a part. */
static size_t dtrain__json_string(const dtrain__json_reader *reader, const dtrain__json_token *token, void *out,
                                  size_t capacity)
{
    size_t written = 0, length = token->end - token->begin;
    if (!token->escaped) {
        if (capacity > 0)
            memmove(out, reader->text + token->begin, length < capacity ? length : capacity);
        return length;
    }
    for (size_t at = token->begin; at < token->end;) {
        unsigned char piece[4] = {reader->text[at], 0, 0, 0};
        size_t bytes = 1, step = 1;
        if (piece[0] == '\\') {
            uint32_t code = 0;
            step = dtrain__json_escape(reader, at, &code);
            bytes = dtrain__json_encode(code, piece);
        }
        if (written <= capacity && bytes <= capacity - written)
            memcpy((unsigned char *)out + written, piece, bytes);
        written += bytes;
        at += step;
    }
    return written;
}

/* Returns whether a STRING or KEY, unescaped, equals the text, which has at most 64 bytes. */
static inline int dtrain__json_is(const dtrain__json_reader *reader, const dtrain__json_token *token, const char *text)
{
    unsigned char have[64];
    size_t bytes = strlen(text);
    if (token->escaped)
        return bytes <= sizeof have && dtrain__json_string(reader, token, have, sizeof have) == bytes &&
               memcmp(have, text, bytes) == 0;
    return token->end - token->begin == bytes && memcmp(reader->text + token->begin, text, bytes) == 0;
}

/* Reads a NUMBER that is a whole number below 2^64 without sign or exponent. Returns 0 for any other token. */
static inline int dtrain__json_u64(const dtrain__json_reader *reader, const dtrain__json_token *token, uint64_t *value)
{
    uint64_t sum = 0;
    *value = 0;
    if (token->kind != DTRAIN__JSON_NUMBER)
        return 0;
    for (size_t at = token->begin; at < token->end; at++) {
        int byte = reader->text[at];
        uint64_t digit = (uint64_t)(byte - '0');
        if (!dtrain__json_in(byte, '0', '9') || sum > UINT64_MAX / 10 || sum * 10 > UINT64_MAX - digit)
            return 0;
        sum = sum * 10 + digit;
    }
    *value = sum;
    return 1;
}

/* Reads any NUMBER of fewer than 80 bytes. Returns 0 for another token. strtod needs the locale's decimal point. */
static int dtrain__json_double(const dtrain__json_reader *reader, const dtrain__json_token *token, double *value)
{
    char text[80];
    const char *point = localeconv()->decimal_point;
    size_t length = 0, bytes = strlen(point);
    if (token->kind != DTRAIN__JSON_NUMBER)
        return 0;
    for (size_t at = token->begin; at < token->end; at++) {
        int is_point = reader->text[at] == '.';
        if (length + bytes + 1 >= sizeof text)
            return 0;
        memcpy(text + length, is_point ? point : (const char *)reader->text + at, is_point ? bytes : 1);
        length += is_point ? bytes : 1;
    }
    text[length] = '\0';
    *value = strtod(text, NULL);
    return 1;
}

DTRAIN__FAST_END
#endif
