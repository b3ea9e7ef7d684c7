/* A program's own loops, as tests/unit/test_client.sh compiles them with dtrain.h above them and without: calls of
 * libm, reductions, products that may be contracted, tests of NaN, and a function with options of its own. */
#include <math.h>

#ifdef __cplusplus
extern "C" {
#endif

void client_exp(float *__restrict out, const float *__restrict in, int count);
void client_log(double *__restrict out, const double *__restrict in, int count);
void client_waves(float *__restrict out, const float *__restrict in, int count);
void client_power(float *__restrict out, const float *__restrict in, float exponent, int count);
float client_sum(const float *in, int count);
float client_dot(const float *a, const float *b, int count);
float client_largest(const float *in, int count);
void client_axpy(float *out, const float *in, float scale, int count);
void client_normalise(float *out, const float *in, float mean, float variance, int count);
double client_root(double x);
int client_strange(const float *in, int count);
void client_gelu(float *out, const float *in, int count);
void client_softmax(float *out, const float *in, int count);

void client_exp(float *__restrict out, const float *__restrict in, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = expf(in[i]);
}

void client_log(double *__restrict out, const double *__restrict in, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = log(in[i]) + exp(in[i]);
}

void client_waves(float *__restrict out, const float *__restrict in, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = sinf(in[i]) + cosf(2.0f * in[i]);
}

void client_power(float *__restrict out, const float *__restrict in, float exponent, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = powf(in[i], exponent) + logf(in[i]);
}

float client_sum(const float *in, int count)
{
    float sum = 0.0f;
    for (int i = 0; i < count; i++)
        sum += in[i];
    return sum;
}

float client_dot(const float *a, const float *b, int count)
{
    float sum = 0.0f;
    for (int i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

float client_largest(const float *in, int count)
{
    float largest = -INFINITY;
    for (int i = 0; i < count; i++)
        largest = fmaxf(largest, in[i]);
    return largest;
}

void client_axpy(float *out, const float *in, float scale, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = scale * in[i] + out[i];
}

void client_normalise(float *out, const float *in, float mean, float variance, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = (in[i] - mean) / sqrtf(variance + 1e-5f);
}

double client_root(double x)
{
    return sqrt(x) / 3.0 - x / 3.0;
}

int client_strange(const float *in, int count)
{
    int strange = 0;
    for (int i = 0; i < count; i++)
        strange += isnan(in[i]) || isinf(in[i]) || signbit(in[i]);
    return strange;
}

#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-finite-math-only")))
#endif
void client_gelu(float *out, const float *in, int count)
{
    for (int i = 0; i < count; i++) {
        float x = in[i];
        float cube = 0.044715f * x * x * x;
        out[i] = 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + cube)));
    }
}

void client_softmax(float *out, const float *in, int count)
{
    float largest = -10000.0f, sum = 0.0f;
    for (int i = 0; i < count; i++)
        if (in[i] > largest)
            largest = in[i];
    for (int i = 0; i < count; i++) {
        out[i] = expf(in[i] - largest);
        sum += out[i];
    }
    float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int i = 0; i < count; i++)
        out[i] *= inverse;
}

#ifdef __cplusplus
}
#endif
