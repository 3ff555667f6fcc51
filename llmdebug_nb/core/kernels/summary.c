/* The figures of a tensor in memory, in one pass: least, greatest, mean, norm, and how many NaN, infinities, zeros.

   A plain C ABI without anything of Python's or torch's, so that one library serves every version of them. The loops
   are plain too: `omp simd` gives the compiler leave to reorder the sums and to vectorise (-fopenmp-simd; no run-time
   library), and each is compiled for several levels of x86-64, of which the best that the processor has is taken.

   Sums are kept in double, block by block, so that the error of a long sum stays at that of a short one, and so that
   several threads give the same bits as one. No zero that is returned is negative. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* signals of threads, also where the compiler is told a standard */
#endif

#include "summary.h"
#include "values.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <pthread.h>
#include <signal.h>
#endif

/* `sums`: room for two sums of each block, or NULL. */
typedef void Kernel(const unsigned char *data, int64_t count, Part *part, double *sums);
typedef void Sizer(const unsigned char *data, int64_t rows, int64_t width, float *to); /* see size_rows */

static inline void add(Part *part, double **sums, double sum, double squares)
{
    if (*sums)
        (*sums)[0] = sum, (*sums)[1] = squares, *sums += 2;
    else
        part->sum += sum, part->squares += squares;
}

/* Floating point. Extremes are taken of the bits as integers, since comparisons of floating-point numbers are
   vectorised only by compilers that may assume away NaN: among equal signs the order of the bits is that of the
   magnitudes, so the greatest signed integer is the greatest value unless all are negative, the greatest unsigned one
   the least value unless none is, and the least unsigned one serves where they don't. */
#define FLOATS(NAME, TARGET, WORD, SHIFT, BITS, SIGNED, INFINITE, VALUE)                                           \
    TARGET static void NAME(const unsigned char *data, int64_t count, Part *part, double *sums)                    \
    {                                                                                                              \
        const BITS magnitudes = (BITS)-1 >> 1;                                                                     \
        BITS least = (BITS)-1, most = 0;                                                                           \
        SIGNED top = -(SIGNED)magnitudes - 1;                                                                      \
        int64_t nan = 0, inf = 0, zero = 0;                                                                        \
        for (int64_t start = 0; start < count; start += SUM_BLOCK) {                                               \
            const unsigned char *block = data + start * (int64_t)sizeof(WORD);                                     \
            const int size = count - start < SUM_BLOCK ? (int)(count - start) : SUM_BLOCK;                         \
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
            zero += block_zero;                                                                                    \
            add(part, &sums, block_sum, block_squares);                                                            \
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
        part->nan = nan, part->inf = inf, part->zero = zero;                                                       \
        part->low = (double)VALUE(most > magnitudes ? most : least) + 0.0;                                         \
        part->high = (double)VALUE(top < 0 ? least : (BITS)top) + 0.0;                                             \
    }

/* Rows, which may be narrow: all in one call. */
#define ROWS(NAME, TARGET, WORD, SHIFT, BITS, INFINITE, VALUE)                                                     \
    TARGET static void NAME(const unsigned char *data, int64_t rows, int64_t width, float *to)                     \
    {                                                                                                              \
        const BITS magnitudes = (BITS)-1 >> 1;                                                                     \
        for (int64_t row = 0; row < rows; row++, data += width * (int64_t)sizeof(WORD)) {                          \
            double squares = 0;                                                                                    \
            BITS most = 0;                                                                                         \
            _Pragma("omp simd reduction(max: most) reduction(+: squares)")                                         \
            for (int64_t i = 0; i < width; i++) {                                                                  \
                WORD word;                                                                                         \
                memcpy(&word, data + i * (int64_t)sizeof word, sizeof word);                                       \
                const BITS bits = (BITS)word << SHIFT, magnitude = bits & magnitudes;                              \
                const double value = VALUE(bits);                                                                  \
                most = magnitude > most ? magnitude : most;                                                        \
                squares += value * value;                                                                          \
            }                                                                                                      \
            to[2 * row] = most > INFINITE ? NAN : (float)sqrt(squares);                                            \
            to[2 * row + 1] = most > INFINITE ? NAN : (float)VALUE(most);                                          \
        }                                                                                                          \
    }

#define INTEGERS(NAME, TARGET, TYPE)                                                                               \
    TARGET static void NAME(const unsigned char *data, int64_t count, Part *part, double *sums)                    \
    {                                                                                                              \
        TYPE low, high;                                                                                            \
        memcpy(&low, data, sizeof low);                                                                            \
        high = low;                                                                                                \
        int64_t zero = 0;                                                                                          \
        for (int64_t start = 0; start < count; start += SUM_BLOCK) {                                               \
            const unsigned char *block = data + start * (int64_t)sizeof(TYPE);                                     \
            const int size = count - start < SUM_BLOCK ? (int)(count - start) : SUM_BLOCK;                         \
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
            zero += block_zero;                                                                                    \
            add(part, &sums, block_sum, block_squares);                                                            \
        }                                                                                                          \
        part->zero = zero, part->low = (double)low, part->high = (double)high;                                     \
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
    ROWS(f32_rows_##LEVEL, TARGET, uint32_t, 0, uint32_t, 0x7f800000u, single_value)                               \
    ROWS(f64_rows_##LEVEL, TARGET, uint64_t, 0, uint64_t, 0x7ff0000000000000u, double_value)                       \
    ROWS(f16_rows_##LEVEL, TARGET, uint16_t, 16, uint32_t, 0x7c000000u, half_value)                                \
    ROWS(bf16_rows_##LEVEL, TARGET, uint16_t, 16, uint32_t, 0x7f800000u, single_value)                             \
    static Sizer *const sizers_##LEVEL[] = {f32_rows_##LEVEL, f64_rows_##LEVEL, f16_rows_##LEVEL, bf16_rows_##LEVEL};\
    static Kernel *const kernels_##LEVEL[] = {                                                                     \
        f32_##LEVEL, f64_##LEVEL, f16_##LEVEL, bf16_##LEVEL, i8_##LEVEL, i16_##LEVEL,                              \
        i32_##LEVEL, i64_##LEVEL, u8_##LEVEL, u16_##LEVEL, u32_##LEVEL, u64_##LEVEL,                               \
    };

KERNELS(any, )

#if defined(__x86_64__) && defined(__GNUC__)
KERNELS(avx2, __attribute__((target("avx2,fma"))))
KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))

static Kernel *const *const kernels[] = {kernels_any, kernels_avx2, kernels_avx512};
static Sizer *const *const sizers[] = {sizers_any, sizers_avx2, sizers_avx512};

/* Return the place of this processor's best kernels. */
static int best(void)
{
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
static Kernel *const *const kernels[] = {kernels_any};
static Sizer *const *const sizers[] = {sizers_any};

static int best(void)
{
    return 0;
}
#endif

/* A thread takes some 20 us to start; a MiB takes 60 to 100. */
enum { SHARE = 1 << 20, MOST_THREADS = 64 };
static const int sizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8}; /* bytes of an element, by kind */

typedef struct {
    Kernel *kernel;
    const unsigned char *data;
    int64_t count;
    double *sums;
    Part part;
} Share;

static void *measure(void *share)
{
    Share *own = share;
    if (own->count > 0)
        own->kernel(own->data, own->count, &own->part, own->sums);
    return NULL;
}

#ifndef _WIN32
/* Measure all shares, the first one here. The program's signals are for its own threads. */
static void measure_all(Share *shares, int64_t many)
{
    pthread_t threads[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int64_t i = 1; i < many; i++)
        started[i] = pthread_create(&threads[i], NULL, measure, &shares[i]) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (int64_t i = 0; i < many; i++)
        if (!started[i])
            measure(&shares[i]);
    for (int64_t i = 1; i < many; i++)
        if (started[i])
            pthread_join(threads[i], NULL);
}
#else
static void measure_all(Share *shares, int64_t many)
{
    for (int64_t i = 0; i < many; i++)
        measure(&shares[i]);
}
#endif

/* Take in the extremes and counts of other elements. */
static void extend(Part *all, const Part *part)
{
    all->low = part->low < all->low ? part->low : all->low;
    all->high = part->high > all->high ? part->high : all->high;
    all->nan += part->nan, all->inf += part->inf, all->zero += part->zero;
}

/* Extremes and counts of all shares; sums block by block, so that they don't depend on the shares. */
static Part joined(const Share *shares, int64_t many, const double *sums, int64_t blocks)
{
    Part all = shares[0].part;
    for (int64_t i = 1; i < many; i++)
        if (shares[i].count > 0)
            extend(&all, &shares[i].part);
    for (int64_t block = 0; block < blocks; block++)
        all.sum += sums[2 * block], all.squares += sums[2 * block + 1];
    return all;
}

Summary tallied(const Tally *all)
{
    const Part *part = &all->part;
    if (part->nan)
        return (Summary){NAN, NAN, NAN, NAN, part->nan, part->inf, part->zero};
    return (Summary){part->low, part->high, part->sum / (double)all->count, sqrt(part->squares), 0, part->inf, part->zero};
}

static int is_kind(int64_t kind)
{
    return kind >= 0 && kind < (int64_t)(sizeof kernels_any / sizeof *kernels_any);
}

static int summarize_by(Kernel *const *by, int64_t kind, const unsigned char *data, int64_t nbytes, int64_t threads,
                        Summary *out)
{
    if (!is_kind(kind))
        return -1;
    Kernel *kernel = by[kind];
    const int64_t count = nbytes / sizes[kind], blocks = (count + SUM_BLOCK - 1) / SUM_BLOCK;
    int64_t many = threads < nbytes / SHARE ? threads : nbytes / SHARE;
    many = many > MOST_THREADS ? MOST_THREADS : many;
    double *sums = many > 1 ? malloc((size_t)blocks * 2 * sizeof *sums) : NULL;
    Part all = {0};
    if (sums) {
        Share shares[MOST_THREADS];
        const int64_t each = (blocks + many - 1) / many * SUM_BLOCK;
        for (int64_t i = 0; i < many; i++) {
            const int64_t from = i * each, left = count - from;
            const unsigned char *first = data + from * sizes[kind];
            shares[i] = (Share){kernel, first, left < each ? left : each, sums + from / SUM_BLOCK * 2, all};
        }
        measure_all(shares, many);
        all = joined(shares, many, sums, blocks);
        free(sums);
    } else
        kernel(data, count, &all, NULL);
    *out = tallied(&(Tally){count, all});
    return 0;
}

int summarize(int64_t kind, const unsigned char *data, int64_t nbytes, int64_t threads, Summary *out)
{
    return summarize_by(kernels[best()], kind, data, nbytes, threads, out);
}

int tally(int64_t kind, const unsigned char *data, int64_t nbytes, Tally *so_far)
{
    if (!is_kind(kind))
        return -1;
    Part part = {.sum = so_far->part.sum, .squares = so_far->part.squares}; /* the kernel adds block by block */
    const int64_t count = nbytes / sizes[kind];
    if (!count)
        return 0;
    kernels[best()][kind](data, count, &part, NULL);
    if (so_far->count)
        extend(&part, &so_far->part);
    *so_far = (Tally){so_far->count + count, part};
    return 0;
}

void size_rows(int64_t kind, const unsigned char *data, int64_t rows, int64_t width, float *to)
{
    sizers[best()][kind](data, rows, width, to);
}

/* Question and answer are one record, since passing several arguments takes ctypes longer than reading a small tensor. */
typedef struct {
    uint64_t address;
    int64_t nbytes, kind, threads;
    Summary summary;
} Call;

EXPORT int llmdebug_figures(Call *call)
{
    const unsigned char *data = (const unsigned char *)(uintptr_t)call->address;
    return summarize(call->kind, data, call->nbytes, call->threads, &call->summary);
}
