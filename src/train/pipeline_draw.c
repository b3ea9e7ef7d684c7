/* ---- >>pipeline-draw ----
 * A plan as text and as a picture. */
#ifndef DTRAIN__PIPELINE_DRAW
#define DTRAIN__PIPELINE_DRAW
#include "pipeline_plan.c"
#include "../base/os.c"

/* Adds to a text that is counted further than it is kept. */
__attribute__((format(printf, 4, 5))) static void dtrain__pipeline_put(char *out, size_t capacity, size_t *used,
                                                                       const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int more =
        vsnprintf(*used < capacity ? out + *used : NULL, *used < capacity ? capacity - *used : 0, format, arguments);
    va_end(arguments);
    *used += more > 0 ? (size_t)more : 0;
}

DTRAIN_API size_t dtrain_pipeline_plan_text(const dtrain_pipeline_plan *plan, char *out, size_t capacity)
{
    size_t used = 0;
    if (capacity > 0)
        out[0] = '\0';
    for (int rank = 0; plan != NULL && rank < plan->desc.ranks; rank++) {
        dtrain__pipeline_put(out, capacity, &used, "%d:", rank);
        for (size_t i = 0; i < plan->rank_tasks; i++) {
            const dtrain_pipeline_task *task = &plan->tasks[(size_t)rank * plan->rank_tasks + i];
            dtrain__pipeline_put(out, capacity, &used, " %s", dtrain__pipeline_task_name(plan, task).text);
        }
        dtrain__pipeline_put(out, capacity, &used, "\n");
    }
    return used;
}

#define DTRAIN__DRAW_ROW 28
#define DTRAIN__DRAW_LEFT 60
#define DTRAIN__DRAW_TOP 30
#define DTRAIN__DRAW_WIDE 1400

static void dtrain__pipeline_draw_task(const dtrain_pipeline_plan *plan, FILE *file, int rank,
                                       const dtrain_pipeline_task *task)
{
    static const char *const colours[] = {"#9ecbff", "#ffd08a", "#a5e3a5", "#e0b3e6"}; /* F, B, I, W */
    double scale = plan->span > 0.0 ? DTRAIN__DRAW_WIDE / plan->span : 0.0, wide = (task->end - task->begin) * scale;
    double x = DTRAIN__DRAW_LEFT + task->begin * scale;
    int y = DTRAIN__DRAW_TOP + rank * DTRAIN__DRAW_ROW;
    dtrain__pipeline_name name = dtrain__pipeline_task_name(plan, task);
    fprintf(file,
            "<g><title>rank %d: %s, %g to %g</title>"
            "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\" stroke=\"#fff\" "
            "stroke-width=\"0.5\"/>",
            rank, name.text, task->begin, task->end, x, y, wide, DTRAIN__DRAW_ROW - 4,
            colours[(int)task->part - (int)DTRAIN_PART_FORWARD]);
    if (wide > 7.0 * (double)strlen(name.text))
        fprintf(file, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\">%s</text>", x + wide / 2, y + 16, name.text);
    fprintf(file, "</g>\n");
}

static void dtrain__pipeline_draw_all(FILE *file, const void *user)
{
    const dtrain_pipeline_plan *plan = (const dtrain_pipeline_plan *)user;
    static const char *const names[] = {"GPipe", "1F1B", "interleaved 1F1B", "ZB-H1"};
    int bottom = DTRAIN__DRAW_TOP + plan->desc.ranks * DTRAIN__DRAW_ROW;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
            "<text x=\"%d\" y=\"18\">%s, %d ranks, %d micro-batches, %d chunks: span %g, bubble %.1f %%</text>\n",
            DTRAIN__DRAW_LEFT + DTRAIN__DRAW_WIDE + 120, bottom + 10, DTRAIN__DRAW_LEFT,
            names[(int)plan->desc.schedule - (int)DTRAIN_PIPELINE_GPIPE], plan->desc.ranks, plan->desc.micro_batches,
            plan->desc.chunks, plan->span, 100.0 * plan->bubble);
    for (int rank = 0; rank < plan->desc.ranks; rank++) {
        int y = DTRAIN__DRAW_TOP + rank * DTRAIN__DRAW_ROW + 16;
        fprintf(file, "<text x=\"8\" y=\"%d\">rank %d</text>\n<text x=\"%d\" y=\"%d\">holds %d</text>\n", y, rank,
                DTRAIN__DRAW_LEFT + DTRAIN__DRAW_WIDE + 10, y, plan->peak[rank]);
        for (size_t i = 0; i < plan->rank_tasks; i++)
            dtrain__pipeline_draw_task(plan, file, rank, &plan->tasks[(size_t)rank * plan->rank_tasks + i]);
    }
    fprintf(file, "</svg>\n");
}

DTRAIN_API dtrain_status dtrain_pipeline_plan_draw(const dtrain_pipeline_plan *plan, const char *path)
{
    if (plan == NULL || path == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "pipeline_plan_draw: a plan and a path are needed");
    int error = dtrain__os_replace_file(path, dtrain__pipeline_draw_all, plan);
    return error == 0
               ? DTRAIN_OK
               : dtrain__fail(NULL, DTRAIN_ERR_IO, "pipeline_plan_draw: cannot write %s: %s", path, strerror(error));
}

#endif
