/* What two tensors in memory differ by: the sums of `comparison/sums.py`, in one pass.

   Each sum is added up as NumPy adds up an array, by halves down to 128 elements and those in eight strands, so that
   both give the same bits. Products are written to memory before they are added, so that no compiler makes one
   operation of both. */

#include "summary.h"
#include "values.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LEAF = 128, STRANDS = 8 };
enum { GD, GD_GD, GG, GG_GG, MM, GM, DD, ABS_D, ABS_G, ABS_M, ULP, SUMS };
enum { F32, F64, F16, BF16, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 }; /* the kinds of summary.c */

/* The question, and the sums so far; `difference.py` packs and reads it.
   `golden`, `mine`: `count` elements. `golden_bits`, `mine_bits`: the same in the coarser dtype, of kind `unit`, or NULL
   if it has no ulp. `width`: of a row, 0 for none. `rows`: room for the `Row` of each. */
typedef struct {
    uint64_t golden, mine, golden_bits, mine_bits, rows;
    int64_t golden_kind, mine_kind, unit, count, width;
    double huge, least;
    double sums[SUMS], relative, most, most_relative, most_ulps;
    int64_t finite, sizeable, within_1, within_5, mismatched, nan, inf;
} Call;

typedef struct {
    double sums[SUMS];
} Sums;

/* The sums of one row, see `difference.py`. */
typedef struct {
    double gg, dd, gd, gg_gg;
} Row;

#define CASE(KIND, TYPE)                                                                                           \
    case KIND: {                                                                                                   \
        for (int64_t i = 0; i < count; i++) {                                                                      \
            TYPE element;                                                                                          \
            memcpy(&element, data + (first + i) * (int64_t)sizeof element, sizeof element);                        \
            out[i] = (double)element;                                                                              \
        }                                                                                                          \
        break;                                                                                                     \
    }
#define HALVES(KIND, VALUE)                                                                                        \
    case KIND: {                                                                                                   \
        for (int64_t i = 0; i < count; i++) {                                                                      \
            uint16_t element;                                                                                      \
            memcpy(&element, data + (first + i) * 2, sizeof element);                                              \
            out[i] = (double)VALUE((uint32_t)element << 16);                                                       \
        }                                                                                                          \
        break;                                                                                                     \
    }

static void widen(int64_t kind, const unsigned char *data, int64_t first, int64_t count, double *out)
{
    switch (kind) {
        CASE(F32, float)
        CASE(F64, double)
        HALVES(F16, half_value)
        HALVES(BF16, single_value)
        CASE(INT8, int8_t)
        CASE(INT16, int16_t)
        CASE(INT32, int32_t)
        CASE(INT64, int64_t)
        CASE(UINT8, uint8_t)
        CASE(UINT16, uint16_t)
        CASE(UINT32, uint32_t)
        CASE(UINT64, uint64_t)
    }
}

/* The distance in representable numbers of each two elements, -0 and +0 alike. */
#define LINE(KIND, BITS, SIGN)                                                                                     \
    case KIND:                                                                                                     \
        for (int64_t i = 0; i < count; i++) {                                                                      \
            BITS a, b;                                                                                             \
            memcpy(&a, golden + i * (int64_t)sizeof a, sizeof a);                                                  \
            memcpy(&b, mine + i * (int64_t)sizeof b, sizeof b);                                                    \
            const int64_t x = a >> (SIGN) ? -(int64_t)(a ^ (BITS)1 << (SIGN)) : (int64_t)a;                        \
            const int64_t y = b >> (SIGN) ? -(int64_t)(b ^ (BITS)1 << (SIGN)) : (int64_t)b;                        \
            out[i] = (double)(x > y ? (uint64_t)x - (uint64_t)y : (uint64_t)y - (uint64_t)x);                      \
        }                                                                                                          \
        break;

static void ulps(int64_t kind, const unsigned char *golden, const unsigned char *mine, int64_t count, double *out)
{
    switch (kind) {
        LINE(F32, uint32_t, 31)
        LINE(F64, uint64_t, 63)
    case BF16: /* its bits are in the order of its values, as those of float16 are */
        LINE(F16, uint16_t, 15)
    }
}

static double added_leaf(const double *x, int64_t count)
{
    if (count < STRANDS) {
        double sum = 0;
        for (int64_t i = 0; i < count; i++)
            sum += x[i];
        return sum;
    }
    double r[STRANDS];
    memcpy(r, x, sizeof r);
    int64_t i = STRANDS;
    for (; i + STRANDS <= count; i += STRANDS)
        for (int j = 0; j < STRANDS; j++)
            r[j] += x[i + j];
    double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < count; i++)
        sum += x[i];
    return sum;
}

static int64_t half_of(int64_t count)
{
    return count / 2 - count / 2 % STRANDS;
}

static double added(const double *x, int64_t count)
{
    if (count <= LEAF)
        return added_leaf(x, count);
    const int64_t half = half_of(count);
    return added(x, half) + added(x + half, count - half);
}

/* Elements that are finite on both sides. `relative`: gets the relative errors of those of golden that have one. */
typedef struct {
    const double *golden, *mine, *ulps;
    double *relative;
    Call *call;
} Pass;

static Sums leaf(Pass *pass, int64_t first, int64_t count)
{
    Call *call = pass->call;
    const double *golden = pass->golden + first, *mine = pass->mine + first;
    double terms[ULP][LEAF];
    for (int64_t i = 0; i < count; i++) {
        const double g = golden[i], m = mine[i], d = m - g;
        terms[GD][i] = g * d;
        terms[GG][i] = g * g;
        terms[MM][i] = m * m;
        terms[GM][i] = g * m;
        terms[DD][i] = d * d;
        terms[ABS_D][i] = fabs(d);
        terms[ABS_G][i] = fabs(g);
        terms[ABS_M][i] = fabs(m);
    }
    for (int64_t i = 0; i < count; i++) {
        terms[GD_GD][i] = terms[GD][i] * terms[GD][i];
        terms[GG_GG][i] = terms[GG][i] * terms[GG][i];
    }
    double most = call->most;
    int64_t mismatched = 0;
    for (int64_t i = 0; i < count; i++) {
        most = terms[ABS_D][i] > most ? terms[ABS_D][i] : most;
        mismatched += terms[ABS_D][i] != 0;
    }
    call->most = most, call->mismatched += mismatched;
    for (int64_t i = 0; i < count; i++)
        if (terms[ABS_G][i] > call->least) {
            const double relative = terms[ABS_D][i] / terms[ABS_G][i];
            *pass->relative++ = relative;
            call->most_relative = relative > call->most_relative ? relative : call->most_relative;
            call->within_1 += relative < 1e-3;
            call->within_5 += relative < 5e-3;
        }
    Sums sums;
    for (int each = 0; each < ULP; each++)
        sums.sums[each] = added_leaf(terms[each], count);
    sums.sums[ULP] = 0;
    if (pass->ulps) {
        const double *of = pass->ulps + first;
        for (int64_t i = 0; i < count; i++)
            call->most_ulps = of[i] > call->most_ulps ? of[i] : call->most_ulps;
        sums.sums[ULP] = added_leaf(of, count);
    }
    return sums;
}

static Sums passed(Pass *pass, int64_t first, int64_t count)
{
    if (count <= LEAF)
        return leaf(pass, first, count);
    const int64_t half = half_of(count);
    Sums all = passed(pass, first, half);
    const Sums other = passed(pass, first + half, count - half);
    for (int each = 0; each < SUMS; each++)
        all.sums[each] += other.sums[each];
    return all;
}

static int is_fine(const Call *call, double g, double m)
{
    return fabs(g) < call->huge && fabs(m) < call->huge; /* no for NaN, too */
}

/* The sums of whole rows, without the positions that are not finite. `room`: for four rows. */
static void measure_rows(const Call *call, const double *golden, const double *mine, double *room)
{
    const int64_t width = call->width;
    double *gg = room, *dd = gg + width, *gd = dd + width, *gg_gg = gd + width;
    Row *row = (Row *)(uintptr_t)call->rows;
    for (int64_t left = call->count / width; left; left--, row++, golden += width, mine += width) {
        for (int64_t i = 0; i < width; i++) {
            const int fine = is_fine(call, golden[i], mine[i]);
            const double g = fine ? golden[i] : 0.0, d = fine ? mine[i] - golden[i] : 0.0;
            gg[i] = g * g;
            dd[i] = d * d;
            gd[i] = g * d;
        }
        for (int64_t i = 0; i < width; i++)
            gg_gg[i] = gg[i] * gg[i];
        *row = (Row){added(gg, width), added(dd, width), added(gd, width), added(gg_gg, width)};
    }
}

static double infinite(const Call *call, double x)
{
    return fabs(x) >= call->huge ? copysign(INFINITY, x) : x;
}

/* Remove the positions that are not finite on both sides, and count them; return how many are left. */
static int64_t strike(Call *call, double *golden, double *mine, double *of_ulps)
{
    int64_t bad = 0, left = 0;
    for (int64_t i = 0; i < call->count; i++)
        bad += !is_fine(call, golden[i], mine[i]);
    if (!bad)
        return call->count;
    for (int64_t i = 0; i < call->count; i++) {
        if (is_fine(call, golden[i], mine[i])) {
            golden[left] = golden[i], mine[left] = mine[i];
            if (of_ulps)
                of_ulps[left] = of_ulps[i];
            left++;
            continue;
        }
        const double a = infinite(call, golden[i]), b = infinite(call, mine[i]);
        const int nans = (a != a) + (b != b);
        call->nan += nans == 1;
        call->inf += nans == 0 && a != b;
        call->mismatched += nans != 2 && a != b;
    }
    return left;
}

/* Add what some elements differ by to the sums. Returns 0, or -1 if there is no memory. */
EXPORT int llmdebug_difference(Call *call)
{
    const int64_t count = call->count;
    double *room = malloc((size_t)(4 * count + 4 * call->width) * sizeof *room);
    if (!room)
        return -1;
    double *golden = room, *mine = golden + count, *of_ulps = NULL, *relative = mine + 2 * count;
    widen(call->golden_kind, (const unsigned char *)(uintptr_t)call->golden, 0, count, golden);
    widen(call->mine_kind, (const unsigned char *)(uintptr_t)call->mine, 0, count, mine);
    if (call->golden_bits) {
        of_ulps = mine + count;
        ulps(call->unit, (const unsigned char *)(uintptr_t)call->golden_bits,
             (const unsigned char *)(uintptr_t)call->mine_bits, count, of_ulps);
    }
    if (call->width)
        measure_rows(call, golden, mine, room + 4 * count);
    const int64_t left = strike(call, golden, mine, of_ulps);
    if (left) {
        Pass pass = {golden, mine, of_ulps, relative, call};
        const Sums sums = passed(&pass, 0, left);
        for (int each = 0; each < SUMS; each++)
            call->sums[each] += sums.sums[each];
        call->relative += added(relative, pass.relative - relative);
        call->sizeable += pass.relative - relative;
        call->finite += left;
    }
    free(room);
    return 0;
}

static int is_single_in_half(uint32_t bits)
{
    const uint32_t magnitude = bits & 0x7fffffff;
    const int exponent = (int)(magnitude >> 23) - 127;
    if (!magnitude || magnitude >= 0x7f800000)
        return 1;
    if (exponent < -24 || exponent > 15)
        return 0;
    const int lost = exponent < -14 ? 13 - 14 - exponent : 13;
    return !((magnitude & 0x7fffff) & ((1u << lost) - 1));
}

static int is_single_in_bfloat(uint32_t bits)
{
    return !(bits & 0xffff) || (bits & 0x7fffffff) > 0x7f800000;
}

/* Tell which dtype of 16 bits holds all of some float32 or float64 numbers exactly, NaN aside: BF16, F16, or -1. */
EXPORT int64_t llmdebug_narrow(const unsigned char *data, int64_t count, int64_t kind)
{
    int bfloat = 1, half = 1;
    for (int64_t i = 0; i < count && (bfloat || half); i++) {
        float value;
        if (kind == F64) {
            double wide;
            memcpy(&wide, data + i * 8, sizeof wide);
            value = (float)wide;
            if ((double)value != wide && wide == wide)
                return -1;
        } else
            memcpy(&value, data + i * 4, sizeof value);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bfloat = bfloat && is_single_in_bfloat(bits);
        half = half && is_single_in_half(bits);
    }
    return bfloat ? BF16 : half ? F16 : -1;
}
