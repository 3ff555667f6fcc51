/* Elements that do not lie packed, in row-major order: copied together, or measured strip by strip. Part of tape.c. */

enum { LINE = 64, REGISTER = 16 }; /* bytes of a line of the cache, and of a register that every processor has */
enum { STRIP = 128 << 10 };        /* bytes: with a block of the summary, it stays in a second-level cache */

#ifdef __clang__
#define ZIP(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZIP(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif
#define LOW_1(a, b) ZIP(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_1(a, b) ZIP(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW_2(a, b) ZIP(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_2(a, b) ZIP(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_4(a, b) ZIP(a, b, 0, 4, 1, 5)
#define HIGH_4(a, b) ZIP(a, b, 2, 6, 3, 7)
#define LOW_8(a, b) ZIP(a, b, 0, 2)
#define HIGH_8(a, b) ZIP(a, b, 1, 3)

/* Copy a matrix whose columns lie packed, `stride` bytes apart. A square as large as the registers is transposed by zipping
   one half with the other, as often as its side can be halved. Lines of the cache are used up while they are at hand. */
#define TRANSPOSE(NAME, ITEM, TYPE, LOW, HIGH)                                                                              \
    static inline void NAME##_square(unsigned char *to, const unsigned char *from, int64_t row, int64_t stride)             \
    {                                                                                                                       \
        enum { SIDE = REGISTER / ITEM };                                                                                    \
        typedef TYPE Register __attribute__((vector_size(REGISTER)));                                                       \
        Register square[SIDE], zipped[SIDE];                                                                                \
        for (int i = 0; i < SIDE; i++)                                                                                      \
            memcpy(&square[i], from + i * stride, REGISTER);                                                                \
        for (int halved = 1; halved < SIDE; halved *= 2) {                                                                  \
            for (int i = 0; i < SIDE / 2; i++) {                                                                            \
                zipped[2 * i] = LOW(square[i], square[i + SIDE / 2]);                                                       \
                zipped[2 * i + 1] = HIGH(square[i], square[i + SIDE / 2]);                                                  \
            }                                                                                                               \
            memcpy(square, zipped, sizeof square);                                                                          \
        }                                                                                                                   \
        for (int i = 0; i < SIDE; i++)                                                                                      \
            memcpy(to + i * row, &square[i], REGISTER);                                                                     \
    }                                                                                                                       \
    static void NAME(unsigned char *to, const unsigned char *from, int64_t rows, int64_t columns, int64_t stride)           \
    {                                                                                                                       \
        enum { SIDE = REGISTER / ITEM, LONG = LINE / ITEM };                                                                \
        const int64_t whole = rows / LONG * LONG, wide = columns / SIDE * SIDE, row = columns * ITEM;                       \
        for (int64_t r = 0; r < whole; r += LONG)                                                                           \
            for (int64_t c = 0; c < wide; c += SIDE)                                                                        \
                for (int64_t i = r; i < r + LONG; i += SIDE)                                                                \
                    NAME##_square(to + i * row + c * ITEM, from + c * stride + i * ITEM, row, stride);                      \
        for (int64_t i = 0; i < rows; i++)                                                                                  \
            for (int64_t c = i < whole ? wide : 0; c < columns; c++)                                                        \
                memcpy(to + i * row + c * ITEM, from + c * stride + i * ITEM, ITEM);                                        \
    }

TRANSPOSE(transpose_1, 1, uint8_t, LOW_1, HIGH_1)
TRANSPOSE(transpose_2, 2, uint16_t, LOW_2, HIGH_2)
TRANSPOSE(transpose_4, 4, uint32_t, LOW_4, HIGH_4)
TRANSPOSE(transpose_8, 8, uint64_t, LOW_8, HIGH_8)

typedef void Transpose(unsigned char *to, const unsigned char *from, int64_t rows, int64_t columns, int64_t stride);
static Transpose *const transposes[] = {[1] = transpose_1, [2] = transpose_2, [4] = transpose_4, [8] = transpose_8};

/* What was gathered. `digester`: takes it, as the tally does, whenever there is no more room; NULL if there is enough. */
typedef struct {
    const Tensor *tensor;
    unsigned char *elements;
    int64_t item, kind, height, filled, room;
    PyObject *digester;
    Tally tally;
} Strips;

/* Measure what was gathered; unless it is the last, whole blocks of the summary alone. */
static int pour(Strips *strips, int last)
{
    const int64_t block = (int64_t)SUM_BLOCK * strips->item, filled = strips->filled;
    const int64_t whole = last ? filled : filled / block * block;
    PyObject *bytes = PyMemoryView_FromMemory((char *)strips->elements, whole, READ);
    PyObject *nothing = bytes ? PyObject_CallMethodObjArgs(strips->digester, update_name, bytes, NULL) : NULL;
    const int done = nothing ? DONE : FAILED;
    Py_XDECREF(bytes);
    Py_XDECREF(nothing);
    tally(strips->kind, strips->elements, whole, &strips->tally);
    memmove(strips->elements, strips->elements + whole, filled - whole);
    strips->filled = filled - whole;
    return done;
}

/* Return where `more` bytes go; NULL with an exception if what was there could not be measured. */
static unsigned char *next(Strips *strips, int64_t more)
{
    if (strips->filled + more > strips->room && pour(strips, 0) == FAILED)
        return NULL;
    unsigned char *to = strips->elements + strips->filled;
    strips->filled += more;
    return to;
}

/* Gather the elements below one dimension. */
static int gather(Strips *strips, const unsigned char *from, int dim)
{
    const Tensor *t = strips->tensor;
    const int64_t item = strips->item, size = t->shape[dim], stride = t->strides[dim] * item;
    const int last = dim == t->ndim - 1, columns = dim == t->ndim - 2 && stride == item;
    const int64_t step = columns ? strips->height : last ? STRIP / item : 1;
    for (int64_t i = 0; i < size; i += step, from += step * stride) {
        const int64_t count = size - i < step ? size - i : step;
        if (!last && !columns) {
            if (gather(strips, from, dim + 1) == FAILED)
                return FAILED;
            continue;
        }
        unsigned char *to = next(strips, count * item * (last ? 1 : t->shape[dim + 1]));
        if (!to)
            return FAILED;
        if (columns)
            transposes[item](to, from, count, t->shape[dim + 1], t->strides[dim + 1] * item);
        else if (stride == item)
            memcpy(to, from, (size_t)(count * item));
        else
            for (int64_t j = 0; j < count; j++, to += item)
                memcpy(to, from + j * stride, (size_t)item);
    }
    return DONE;
}

/* Return scratch memory; NULL if there is none. It is in use while `packing` is set. */
static unsigned char *scratch(Tape *tape, int64_t nbytes)
{
    if (tape->packing)
        return NULL;
    if (nbytes > tape->room) {
        PyMem_Free(tape->scratch); /* what is in it need not be copied */
        tape->scratch = PyMem_Malloc(nbytes);
        tape->room = tape->scratch ? nbytes : 0;
    }
    return tape->scratch;
}

/* Give back what is larger than usual: of a weight, which is measured once. */
static void give_back_scratch(Tape *tape)
{
    if (tape->room <= MOST_SCRATCH || tape->packing)
        return;
    PyMem_Free(tape->scratch);
    tape->scratch = NULL, tape->room = 0;
}

/* Return where elements lie packed: where they are, or a copy in the scratch memory; NULL if there is no room. */
static unsigned char *packed_data(Tape *tape, unsigned char *data, const Tensor *t, int packed, int64_t nbytes)
{
    unsigned char *elements = packed ? data : scratch(tape, nbytes);
    Strips all = {.tensor = t, .elements = elements, .item = t->dtype.bits / 8, .height = ENDLESS, .room = nbytes};
    if (!packed && elements)
        gather(&all, data, 0);
    return elements;
}

/* Take in elements that lie packed: each is read from memory once. */
static int take_in(Strips *strips, unsigned char *data, int64_t nbytes)
{
    int done = DONE;
    for (int64_t at = 0; at < nbytes && done == DONE; at += STRIP) { /* whole blocks of the summary */
        strips->elements = data + at;
        strips->filled = nbytes - at < STRIP ? nbytes - at : STRIP;
        done = pour(strips, 1);
    }
    return done;
}

/* Measure many elements, as `measure` does: each is read from memory once, and those that do not lie packed are not all copied. */
static int measure_in_strips(Tape *tape, Seen *seen, unsigned char *data, const Tensor *t, int packed, int64_t nbytes)
{
    const int64_t item = t->dtype.bits / 8, row = t->shape[t->ndim - 1] * item, lines = STRIP / (row * LINE / item);
    const int64_t height = (lines > 1 ? lines : 1) * LINE / item, columns = t->ndim > 1 && t->strides[t->ndim - 2] == 1;
    const int64_t room = SUM_BLOCK * item + (columns && row * height > STRIP ? row * height : STRIP);
    PyObject *digester = PyObject_CallNoArgs(tape->digester);
    unsigned char *elements = packed ? data : digester ? scratch(tape, room) : NULL;
    Strips strips = {t, elements, item, seen->kind == BOOLS ? UINT8 : seen->kind, height, 0, room, digester, {0}};
    if (!digester || !elements) {
        Py_XDECREF(digester);
        return digester ? REFUSED : FAILED;
    }
    tape->packing |= !packed;
    int done = packed ? take_in(&strips, data, nbytes) : gather(&strips, data, 0);
    done = done == DONE && !packed ? pour(&strips, 1) : done;
    tape->packing &= packed;
    PyObject *digest = done == DONE ? PyObject_CallMethodObjArgs(digester, intdigest_name, NULL) : NULL;
    seen->digest = digest ? PyLong_AsUnsignedLongLong(digest) : 0;
    seen->summary = tallied(&strips.tally);
    Py_XDECREF(digest);
    Py_XDECREF(digester);
    return PyErr_Occurred() ? FAILED : DONE;
}
