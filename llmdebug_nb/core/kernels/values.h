/* Numbers from their bits. */

#ifndef LLMDEBUG_VALUES_H
#define LLMDEBUG_VALUES_H

#include <stdint.h>
#include <string.h>

static inline float single_value(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double double_value(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* IEEE half precision in the upper 16 bits. Integers do it, as no instruction for it is everywhere. */
static inline float half_value(uint32_t bits)
{
    const uint32_t magnitude = bits >> 3 & 0x0fffe000; /* exponent and mantissa where single precision has them */
    const uint32_t rebias = (127 - 15) << 23;
    const float normal = single_value(magnitude + (magnitude < 0x1f << 23 ? rebias : 2 * rebias));
    const float subnormal = single_value(magnitude + rebias + (1 << 23)) - 0x1p-14f;
    const float value = magnitude < 1 << 23 ? subnormal : normal;
    return bits >> 31 ? -value : value;
}

#endif
