/* Rows as MessagePack, in an array that begins with their count, as core/batches.py and store/waiting.py have it. Part of tape.c. */

enum { USUAL_ROW = 1 << 10 /* bytes */, HEAD = 5 /* before the first row */, UNKNOWN = -1 /* of a count, as in rows.py */ };

/* A row that is being packed. `room`: of `bytes`, which grow. `failed`: no memory, or something is no text.
   `figures`: where those go that are not known yet; -1 if all are. */
typedef struct {
    unsigned char *bytes;
    int64_t size, room, figures;
    int failed;
} Row;

static void put(Row *to, const void *bytes, int64_t size)
{
    if (to->size + size > to->room) {
        const int64_t room = 2 * (to->size + size) + USUAL_ROW;
        unsigned char *larger = PyMem_Realloc(to->bytes, (size_t)room);
        if (!larger) {
            to->failed = 1;
            return;
        }
        to->bytes = larger, to->room = room;
    }
    memcpy(to->bytes + to->size, bytes, (size_t)size);
    to->size += size;
}

static void put_big_endian(Row *to, unsigned char kind, uint64_t value, int bytes)
{
    unsigned char out[9] = {kind};
    for (int i = 0; i < bytes; i++)
        out[1 + i] = (unsigned char)(value >> (8 * (bytes - 1 - i)));
    put(to, out, 1 + bytes);
}

static void put_integer(Row *to, int64_t value)
{
    if (value >= 0 && value < 128)
        put(to, &(unsigned char){(unsigned char)value}, 1);
    else if (value >= 0 && value <= UINT32_MAX)
        put_big_endian(to, 0xce, (uint64_t)value, 4);
    else
        put_big_endian(to, 0xd3, (uint64_t)value, 8);
}

static void put_float(Row *to, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_big_endian(to, 0xcb, bits, 8);
}

static void put_nothing(Row *to)
{
    put(to, "\xc0", 1);
}

static void put_bytes(Row *to, const char *text, int64_t size)
{
    if (size < 32)
        put(to, &(unsigned char){(unsigned char)(0xa0 | size)}, 1);
    else if (size < 256)
        put_big_endian(to, 0xd9, (uint64_t)size, 1);
    else
        put_big_endian(to, 0xdb, (uint64_t)size, 4);
    put(to, text, size);
}

/* Pack a text or None. */
static void put_text(Row *to, PyObject *text)
{
    if (to->failed)
        return;
    if (text == Py_None) {
        put_nothing(to);
        return;
    }
    Py_ssize_t size = 0;
    const char *utf8 = PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, &size) : NULL;
    if (utf8)
        put_bytes(to, utf8, size);
    else
        to->failed = 1;
}

/* Pack bytes or None. */
static void put_binary(Row *to, PyObject *bytes)
{
    const Py_ssize_t size = bytes == Py_None ? 0 : PyBytes_Size(bytes);
    if (bytes == Py_None)
        put_nothing(to);
    else if (size < 0)
        to->failed = 1;
    else {
        put_big_endian(to, 0xc6, (uint64_t)size, 4);
        put(to, PyBytes_AsString(bytes), size);
    }
}

/* Pack an integer or None. */
static void put_number(Row *to, PyObject *number)
{
    if (to->failed)
        return;
    if (number == Py_None) {
        put_nothing(to);
        return;
    }
    const int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred())
        to->failed = 1;
    else
        put_integer(to, value);
}

/* Append a row to the packed array, which begins with the count of its rows. */
static int add_packed(PyObject *array, const Row *row)
{
    const Py_ssize_t before = PyByteArray_Size(array);
    if (PyByteArray_Resize(array, before + row->size) != 0)
        return FAILED;
    unsigned char *data = (unsigned char *)PyByteArray_AsString(array);
    memcpy(data + before, row->bytes, (size_t)row->size);
    for (int i = HEAD - 1; i > 0 && ++data[i] == 0; i--)
        ;
    return DONE;
}
