/* The figures of a tensor in memory, in one pass: least, greatest, mean, norm, and how many NaN, infinities, zeros.

   A plain C ABI without anything of Python's or torch's, so that one library serves every version of them. The loops
   are plain too: `omp simd` gives the compiler leave to reorder the sums and to vectorise (-fopenmp-simd; no run-time
   library), and each is compiled for several levels of x86-64, of which the best that the processor has is taken.

   Sums are kept in double, block by block, so that the error of a long sum stays at that of a short one. No zero that
   is returned is negative. */

#include "summary.h"
#include "values.h"

#include <math.h>
#include <string.h>

typedef void Kernel(const unsigned char *data, int64_t nbytes, Summary *out);

enum { BLOCK = 1 << 14 };

/* Floating point. Extremes are taken of the bits as integers, since comparisons of floating-point numbers are
   vectorised only by compilers that may assume away NaN: among equal signs the order of the bits is that of the
   magnitudes, so the greatest signed integer is the greatest value unless all are negative, the greatest unsigned one
   the least value unless none is, and the least unsigned one serves where they don't. */
#define FLOATS(NAME, TARGET, WORD, SHIFT, BITS, SIGNED, INFINITE, VALUE)                                           \
    TARGET static void NAME(const unsigned char *data, int64_t nbytes, Summary *out)                               \
    {                                                                                                              \
        const int64_t count = nbytes / (int64_t)sizeof(WORD);                                                      \
        const BITS magnitudes = (BITS)-1 >> 1;                                                                     \
        BITS least = (BITS)-1, most = 0;                                                                           \
        SIGNED top = -(SIGNED)magnitudes - 1;                                                                      \
        double sum = 0, squares = 0;                                                                               \
        int64_t nan = 0, inf = 0, zero = 0;                                                                        \
        for (int64_t start = 0; start < count; start += BLOCK) {                                                   \
            const unsigned char *block = data + start * (int64_t)sizeof(WORD);                                     \
            const int size = count - start < BLOCK ? (int)(count - start) : BLOCK;                                 \
            double block_sum = 0, block_squares = 0;                                                               \
            SIGNED block_nan = 0, block_inf = 0, block_zero = 0;                                                   \
            _Pragma("omp simd reduction(min: least) reduction(max: most, top)                                      \
                              reduction(+: block_sum, block_squares, block_zero)")                                 \
            for (int i = 0; i < size; i++) {                                                                       \
                WORD word;                                                                                         \
                memcpy(&word, block + i * sizeof word, sizeof word);                                               \
                const BITS bits = (BITS)word << SHIFT;                                                             \
                const double value = VALUE(bits);                                                                  \
                least = bits < least ? bits : least;                                                               \
                most = bits > most ? bits : most;                                                                  \
                top = (SIGNED)bits > top ? (SIGNED)bits : top;                                                     \
                block_sum += value;                                                                                \
                block_squares += value * value;                                                                    \
                if (value == 0)                                                                                    \
                    block_zero += 1;                                                                               \
            }                                                                                                      \
            sum += block_sum, squares += block_squares, zero += block_zero;                                        \
            if ((most & magnitudes) < INFINITE && top < (SIGNED)INFINITE)                                          \
                continue;                                                                                          \
            _Pragma("omp simd reduction(+: block_nan, block_inf)")                                                 \
            for (int i = 0; i < size; i++) {                                                                       \
                WORD word;                                                                                         \
                memcpy(&word, block + i * sizeof word, sizeof word);                                               \
                const BITS magnitude = (BITS)word << SHIFT & magnitudes;                                           \
                block_nan += magnitude > INFINITE;                                                                 \
                block_inf += magnitude == INFINITE;                                                                \
            }                                                                                                      \
            nan += block_nan, inf += block_inf;                                                                    \
        }                                                                                                          \
        const double low = VALUE(most > magnitudes ? most : least);                                                \
        const double high = VALUE(top < 0 ? least : (BITS)top);                                                    \
        *out = nan ? (Summary){NAN, NAN, NAN, NAN, nan, inf, zero}                                                 \
                   : (Summary){low + 0.0, high + 0.0, sum / (double)count, sqrt(squares), nan, inf, zero};         \
    }

#define INTEGERS(NAME, TARGET, TYPE)                                                                               \
    TARGET static void NAME(const unsigned char *data, int64_t nbytes, Summary *out)                               \
    {                                                                                                              \
        const int64_t count = nbytes / (int64_t)sizeof(TYPE);                                                      \
        TYPE low, high;                                                                                            \
        memcpy(&low, data, sizeof low);                                                                            \
        high = low;                                                                                                \
        double sum = 0, squares = 0;                                                                               \
        int64_t zero = 0;                                                                                          \
        for (int64_t start = 0; start < count; start += BLOCK) {                                                   \
            const unsigned char *block = data + start * (int64_t)sizeof(TYPE);                                     \
            const int size = count - start < BLOCK ? (int)(count - start) : BLOCK;                                 \
            double block_sum = 0, block_squares = 0;                                                               \
            int block_zero = 0;                                                                                    \
            _Pragma("omp simd reduction(min: low) reduction(max: high)                                             \
                              reduction(+: block_sum, block_squares, block_zero)")                                 \
            for (int i = 0; i < size; i++) {                                                                       \
                TYPE element;                                                                                      \
                memcpy(&element, block + i * sizeof element, sizeof element);                                      \
                const double value = (double)element;                                                              \
                low = element < low ? element : low;                                                               \
                high = element > high ? element : high;                                                            \
                block_sum += value;                                                                                \
                block_squares += value * value;                                                                    \
                block_zero += element == 0;                                                                        \
            }                                                                                                      \
            sum += block_sum, squares += block_squares, zero += block_zero;                                        \
        }                                                                                                          \
        *out = (Summary){(double)low, (double)high, sum / (double)count, sqrt(squares), 0, 0, zero};               \
    }

/* All kernels for one kind of processor, and their table: `kind` is the place in it. */
#define KERNELS(LEVEL, TARGET)                                                                                     \
    FLOATS(f32_##LEVEL, TARGET, uint32_t, 0, uint32_t, int32_t, 0x7f800000u, single_value)                         \
    FLOATS(f64_##LEVEL, TARGET, uint64_t, 0, uint64_t, int64_t, 0x7ff0000000000000u, double_value)                 \
    FLOATS(f16_##LEVEL, TARGET, uint16_t, 16, uint32_t, int32_t, 0x7c000000u, half_value)                          \
    FLOATS(bf16_##LEVEL, TARGET, uint16_t, 16, uint32_t, int32_t, 0x7f800000u, single_value)                       \
    INTEGERS(i8_##LEVEL, TARGET, int8_t)                                                                           \
    INTEGERS(i16_##LEVEL, TARGET, int16_t)                                                                         \
    INTEGERS(i32_##LEVEL, TARGET, int32_t)                                                                         \
    INTEGERS(i64_##LEVEL, TARGET, int64_t)                                                                         \
    INTEGERS(u8_##LEVEL, TARGET, uint8_t)                                                                          \
    INTEGERS(u16_##LEVEL, TARGET, uint16_t)                                                                        \
    INTEGERS(u32_##LEVEL, TARGET, uint32_t)                                                                        \
    INTEGERS(u64_##LEVEL, TARGET, uint64_t)                                                                        \
    static Kernel *const kernels_##LEVEL[] = {                                                                     \
        f32_##LEVEL, f64_##LEVEL, f16_##LEVEL, bf16_##LEVEL, i8_##LEVEL, i16_##LEVEL,                              \
        i32_##LEVEL, i64_##LEVEL, u8_##LEVEL, u16_##LEVEL, u32_##LEVEL, u64_##LEVEL,                               \
    };

KERNELS(any, )

#if defined(__x86_64__) && defined(__GNUC__)
KERNELS(avx2, __attribute__((target("avx2,fma"))))
KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))

static Kernel *const *best(void)
{
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return kernels_avx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kernels_avx2 : kernels_any;
}
#else
static Kernel *const *best(void)
{
    return kernels_any;
}
#endif

int summarize(int64_t kind, const unsigned char *data, int64_t nbytes, Summary *out)
{
    if (kind < 0 || kind >= (int64_t)(sizeof kernels_any / sizeof *kernels_any))
        return -1;
    best()[kind](data, nbytes, out);
    return 0;
}

/* Question and answer are one record, since passing several arguments takes ctypes longer than reading a small tensor. */
typedef struct {
    uint64_t address;
    int64_t nbytes, kind;
    Summary summary;
} Call;

EXPORT int llmdebug_summary(Call *call)
{
    return summarize(call->kind, (const unsigned char *)(uintptr_t)call->address, call->nbytes, &call->summary);
}
