/* What create calls compare on all ranks: the tables of the fields of descs. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "locales.h"

typedef struct compared {
    const dtrain__alike_field *fields;
    size_t count;
    unsigned char *desc;
} compared;

static int compared_line(const void *pointer, size_t index, dtrain__alike_line *line)
{
    const compared *c = (const compared *)pointer;
    return index < c->count && dtrain__alike_field_line(line, "desc.", &c->fields[index], c->desc);
}

static void digest_of(const compared *c, uint64_t words[4])
{
    dtrain__alike alike = {"test", c, compared_line, "", 0, {0}, 0};
    dtrain__alike_digest(&alike, words);
}

/* Flips every byte of a desc that is zero, and sees that the digest changes but where the table says that the field is
 * each rank's own. Bytes of no field are padding, of which there are so many. */
static void check_table(const dtrain__alike_field *fields, size_t count, size_t bytes, size_t padding)
{
    compared c = {fields, count, (unsigned char *)calloc(1, bytes)};
    const char *name = "";
    uint64_t before[4], after[4];
    for (size_t i = 0; i < count; i++)
        if (fields[i].kind == DTRAIN__ALIKE_NAME)
            memcpy(c.desc + fields[i].offset, &name, sizeof name);
    digest_of(&c, before);
    for (size_t at = 0; at < bytes; at++) {
        const dtrain__alike_field *field = NULL;
        for (size_t i = 0; i < count; i++)
            if (at >= fields[i].offset && at < fields[i].offset + fields[i].bytes) {
                CHECK(field == NULL); /* it is in one field only */
                field = &fields[i];
            }
        padding -= field == NULL;
        if (field == NULL || field->kind == DTRAIN__ALIKE_NAME) /* an address to be read */
            continue;
        c.desc[at] = 0x81;
        digest_of(&c, after);
        c.desc[at] = 0;
        if ((memcmp(before, after, sizeof before) != 0) != (field->kind != DTRAIN__ALIKE_OWN))
            fprintf(stderr, "byte %zu, of %s\n", at, field->name);
        CHECK_EQ(memcmp(before, after, sizeof before) != 0, field->kind != DTRAIN__ALIKE_OWN);
    }
    if (sizeof(void *) == 8) /* with 32 bits structs have less */
        CHECK_EQ(padding, 0);
    free(c.desc);
}

#define CHECK_TABLE(fields, desc, padding) check_table(fields, sizeof(fields) / sizeof *(fields), sizeof(desc), padding)

TEST(every_byte_of_a_desc_is_compared_or_each_ranks_own)
{
    CHECK_TABLE(dtrain__fsdp_fields, dtrain_fsdp_desc, 8);
    CHECK_TABLE(dtrain__fsdp_group_fields, dtrain_param_group, 4);
    CHECK_TABLE(dtrain__params_compress_fields, dtrain_compress_desc, 20);
    CHECK_TABLE(dtrain__rounds_fields, dtrain_local_sgd_desc, 8);
    CHECK_TABLE(dtrain__server_fields, dtrain_server_desc, 0);
    CHECK_TABLE(dtrain__checkpoint_fields, dtrain_checkpoint_desc, 0);
    CHECK_TABLE(dtrain__pipeline_fields, dtrain_pipeline_plan_desc, 0);
    CHECK_TABLE(dtrain__device_fields, dtrain_device_group_desc, 4);
}

TEST(a_name_is_compared_as_text)
{
    dtrain_param_group group;
    dtrain__alike_line line;
    char name[] = "w*";
    memset(&group, 0, sizeof group);
    group.name = name;
    CHECK(dtrain__alike_field_line(&line, "desc.groups[2].", &dtrain__fsdp_group_fields[0], &group));
    CHECK(strcmp(line.what, "desc.groups[2].name") == 0 && strcmp(line.value, "\"w*\"") == 0);
}

TEST(fields_say_their_value_as_the_caller_writes_it)
{
    static const char *const expected[] = {"DDP", "-3", "BF16", "none"};
    dtrain_fsdp_desc desc;
    dtrain__alike_line line;
    memset(&desc, 0, sizeof desc);
    desc.strategy = DTRAIN_DDP;
    desc.shard_size = -3;
    desc.gather_dtype = DTRAIN_BF16;
    for (int i = 0; i < 4; i++) {
        CHECK(dtrain__alike_field_line(&line, "desc.", &dtrain__fsdp_fields[i], i < 3 ? &desc : NULL));
        CHECK(strcmp(line.value, expected[i]) == 0);
    }
    desc.bucket_bytes = SIZE_MAX / 2;
    for (size_t i = 0; i < sizeof dtrain__fsdp_fields / sizeof dtrain__fsdp_fields[0]; i++)
        if (strcmp(dtrain__fsdp_fields[i].name, "bucket_bytes") == 0)
            CHECK(dtrain__alike_field_line(&line, "", &dtrain__fsdp_fields[i], &desc));
    CHECK(strcmp(line.value, sizeof(size_t) == 8 ? "9223372036854775807" : "2147483647") == 0);
}

TEST(a_number_is_the_same_text_in_every_locale)
{
    dtrain__alike_line line;
    int other = locale_of_two_bytes();
    CHECK(dtrain__alike_number(&line, "lr is", -0.25, 0));
    CHECK(strcmp(line.value, "-0.25") == 0);
    if (other)
        setlocale(LC_ALL, "C");
}
