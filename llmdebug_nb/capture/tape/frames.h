/* Frames of values, as store/format.py makes them: a header that names the record, then the values. Part of tape.c.

   The record is JSON in a text of JSON: its quotes and backslashes are escaped twice. */

enum { FRAME_ALIGN = 8, OF_LENGTH = 8 /* bytes */, MOST_WAITING = 4 << 10 /* bytes, as in store/writer.py */ };

static void put_plain(Row *to, const char *text)
{
    put(to, text, (int64_t)strlen(text));
}

/* Write a character of a text as msgspec does, in a text. */
static void put_escaped(Row *to, unsigned char c)
{
    static const char hex[] = "0123456789abcdef", named[] = "\bb\ff\nn\rr\tt";
    if (c == '"')
        put_plain(to, "\\\\\\\"");
    else if (c == '\\')
        put_plain(to, "\\\\\\\\");
    else if (c >= 0x20)
        put(to, &c, 1);
    else {
        const char *name = c ? memchr(named, c, sizeof named - 1) : NULL;
        put_plain(to, "\\\\");
        if (name)
            put(to, name + 1, 1);
        else
            put(to, (char[]){'u', '0', '0', hex[c >> 4], hex[c & 15]}, 5);
    }
}

static void put_json_text(Row *to, const char *text, int64_t size)
{
    int64_t from = 0;
    put_plain(to, "\\\"");
    for (int64_t i = 0; i < size; i++)
        if (text[i] == '"' || text[i] == '\\' || (unsigned char)text[i] < 0x20) {
            put(to, text + from, i - from);
            put_escaped(to, (unsigned char)text[i]);
            from = i + 1;
        }
    put(to, text + from, size - from);
    put_plain(to, "\\\"");
}

static void put_json_number(Row *to, int64_t number)
{
    char digits[24], *end = digits + sizeof digits, *at = end;
    uint64_t rest = number < 0 ? -(uint64_t)number : (uint64_t)number;
    do
        *--at = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0)
        *--at = '-';
    put(to, at, end - at);
}

/* Write a text, a number or null. */
static void put_json(Row *to, PyObject *value)
{
    Py_ssize_t size = 0;
    if (to->failed)
        return;
    if (value == Py_None)
        put_plain(to, "null");
    else if (PyUnicode_Check(value)) {
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        if (text)
            put_json_text(to, text, size);
        else
            to->failed = 1;
    } else {
        const long long number = PyLong_AsLongLong(value);
        to->failed = number == -1 && PyErr_Occurred();
        put_json_number(to, number);
    }
}

/* Write the columns from the dtype to the fingerprint. The figures can be computed again. */
static void put_json_content(Row *to, const Seen *seen)
{
    const Summary *s = &seen->summary;
    char print[PRINT + 1], shape[LONGEST_SHAPE], *at = shape_in(seen, shape);
    print_in(seen, print);
    put_json(to, PyTuple_GetItem(seen->names, seen->kind));
    put_plain(to, ",");
    put_json_text(to, at, shape + LONGEST_SHAPE - at);
    put_plain(to, ",null,null,null,null");
    const int64_t counts[] = {s->nan, s->inf, s->zero};
    for (int i = 0; i < 3; i++) {
        put_plain(to, ",");
        put_json_number(to, counts[i]);
    }
    put_plain(to, ",");
    put_json_text(to, print, PRINT);
}

/* Write what the values are that follow. */
static void put_tensor(Row *to, const Seen *seen, PyObject *stored, int64_t nbytes)
{
    char shape[LONGEST_SHAPE], *at = shape_in(seen, shape);
    PyObject *name = PyDict_GetItemWithError(stored, PyTuple_GetItem(seen->names, seen->kind));
    Py_ssize_t size = 0;
    const char *text = name ? PyUnicode_AsUTF8AndSize(name, &size) : "U8";
    to->failed |= !text;
    put_plain(to, ",\"tensor\":{\"dtype\":\"");
    put_plain(to, text ? text : "");
    put_plain(to, "\",\"shape\":");
    if (name)
        put(to, at, shape + LONGEST_SHAPE - at);
    else {
        put_plain(to, "[");
        put_json_number(to, nbytes);
        put_plain(to, "]");
    }
    put_plain(to, ",\"data_offsets\":[0,");
    put_json_number(to, nbytes);
    put_plain(to, "]}");
}

/* Write the header of a frame. `known`: NULL if the tensor's own values follow, else the row that says where they are. */
static int put_header(Play *play, const Call *call, const Said *said, const Seen *seen, PyObject *known)
{
    Row *to = &play->frame;
    to->size = to->failed = 0;
    put(to, "\0\0\0\0\0\0\0", OF_LENGTH);
    put_plain(to, "{\"__metadata__\":{\"record\":\"[");
    PyObject *before[] = {said->number, play->now.root_call, call->path, call->number, forward_text, said->role, said->slot, call->op};
    PyObject *after[] = {cpu_text, said->producer, known ? PyList_GetItem(known, AT_OFFSET) : Py_None,
                         known ? PyList_GetItem(known, AT_OFFSET + 1) : Py_None, Py_None, Py_None, Py_None, said->argument,
                         said->chain, Py_None, Py_None};
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        put_json(to, before[i]);
        put_plain(to, ",");
    }
    put_json_content(to, seen);
    for (size_t i = 0; i < sizeof after / sizeof *after; i++) {
        put_plain(to, ",");
        put_json(to, after[i]);
    }
    put_plain(to, "]\"}");
    if (!known)
        put_tensor(to, seen, play->into.stored, PyObject_Size(seen->values));
    put_plain(to, "}");
    while (to->size % FRAME_ALIGN && !to->failed)
        put_plain(to, " ");
    for (int i = 0; i < OF_LENGTH && !to->failed; i++)
        to->bytes[i] = (unsigned char)((uint64_t)(to->size - OF_LENGTH) >> 8 * i);
    if (to->failed && !PyErr_Occurred())
        PyErr_NoMemory();
    return to->failed ? FAILED : DONE;
}

/* Return the header of a frame with the tensor's own values as bytes; none if they are lost. */
static PyObject *frame_header(Play *play, const Call *call, const Said *said, const Seen *seen)
{
    if (!seen->values)
        return PyBytes_FromStringAndSize("", 0);
    return put_header(play, call, said, seen, NULL) == DONE
               ? PyBytes_FromStringAndSize((char *)play->frame.bytes, play->frame.size)
               : NULL;
}

/* Add a frame without values to those that are written with the next values. */
static int add_frame(Play *play, const Call *call, const Said *said, const Seen *seen, PyObject *known)
{
    if (put_header(play, call, said, seen, known) != DONE)
        return FAILED;
    const Py_ssize_t before = PyByteArray_Size(play->into.frames);
    if (PyByteArray_Resize(play->into.frames, before + play->frame.size) != 0)
        return FAILED;
    memcpy(PyByteArray_AsString(play->into.frames) + before, play->frame.bytes, (size_t)play->frame.size);
    if (before + play->frame.size < MOST_WAITING)
        return DONE;
    PyObject *written = PyObject_CallMethodObjArgs(play->into.values, write_name, NULL);
    Py_XDECREF(written);
    return written ? DONE : FAILED;
}
