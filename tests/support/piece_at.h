/* What a list has, one piece after another. Include dtrain.h first. */
#ifndef DTRAIN_TEST_PIECE_AT_H
#define DTRAIN_TEST_PIECE_AT_H

typedef struct piece_finder {
    int left;
    dtrain_piece piece;
    char name[64];
} piece_finder;

static inline void piece_find(void *user, const dtrain_piece *piece)
{
    piece_finder *f = (piece_finder *)user;
    if (f->left-- != 0)
        return;
    f->piece = *piece;
    snprintf(f->name, sizeof f->name, "%s", piece->name);
    if (strrchr(f->name, '.') != NULL)
        *strrchr(f->name, '.') = 0;
}

/* Piece `index` of a list whose names end with numbers, which are left out of its name; NULL beyond the last. Good
 * until the thread's next but one. */
static inline const dtrain_piece *piece_at(dtrain_pieces list, int index)
{
    static __thread piece_finder found[2];
    static __thread int turn;
    piece_finder *f = &found[turn++ % 2];
    f->left = index;
    if (dtrain_pieces_each(&list, 1, 64, 0, piece_find, f) != DTRAIN_OK)
        return NULL;
    f->piece.name = f->name;
    return f->left < 0 ? &f->piece : NULL;
}

/* How many pieces of a list are named so, but for the number. */
static inline int pieces_named(dtrain_pieces list, const char *name)
{
    const dtrain_piece *piece;
    int count = 0;
    for (int i = 0; (piece = piece_at(list, i)) != NULL; i++)
        count += strcmp(piece->name, name) == 0;
    return count;
}

#endif
