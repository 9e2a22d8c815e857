/* Calls int64_t fn(const int64_t* args) by address, with Python ints as arguments and the GIL released. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>

#define ON_STACK 512

typedef int64_t (*entry)(const int64_t*);

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  entry fn;
  Py_ssize_t count;
} Bound;

/* A non-negative int of at most two 30-bit digits, which every address and size is, or -1 for any other object.
   PyLong_AsLongLong goes byte by byte through more than one digit, and every argument of every call is one. */
static inline int64_t two_digits(PyObject* value) {
#if PYLONG_BITS_IN_DIGIT == 30 && PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000
  if (!PyLong_CheckExact(value)) return -1;
#if PY_VERSION_HEX < 0x030C0000
  const Py_ssize_t size = Py_SIZE(value); /* negative for a negative int */
  const digit* digits = ((PyLongObject*)value)->ob_digit;
#else
  const uintptr_t tag = ((PyLongObject*)value)->long_value.lv_tag; /* size * 8 + sign, where 2 is negative */
  const Py_ssize_t size = (tag & 3) == 2 ? -1 : (Py_ssize_t)(tag >> 3);
  const digit* digits = ((PyLongObject*)value)->long_value.ob_digit;
#endif
  if (size == 2) return (int64_t)digits[0] | (int64_t)digits[1] << 30;
  if (size == 1) return (int64_t)digits[0];
  return size == 0 ? 0 : -1;
#else
  (void)value;
  return -1;
#endif
}

static PyObject* call_entry(entry fn, PyObject* const* values, Py_ssize_t count) {
  int64_t stack[ON_STACK];
  int64_t* args = stack;
  if (count > ON_STACK) {
    args = (int64_t*)PyMem_Malloc((size_t)count * sizeof(int64_t));
    if (args == NULL) return PyErr_NoMemory();
  }
  PyObject* result = NULL;
  for (Py_ssize_t i = 0; i < count; ++i) {
    args[i] = two_digits(values[i]);
    if (args[i] >= 0) continue;
    args[i] = (int64_t)PyLong_AsLongLong(values[i]); /* takes __index__ too, refuses floats */
    if (args[i] == -1 && PyErr_Occurred()) goto done;
  }
  int64_t status;
  Py_BEGIN_ALLOW_THREADS
  status = fn(args);
  Py_END_ALLOW_THREADS
  /* What torch, or a kernel that is written in Python, raised in a failed call: the caller raises it again from the
     code. After any other code it is what the caller sees. */
  if (status < 0) PyErr_Clear();
  if (!PyErr_Occurred()) result = PyLong_FromLongLong(status);
done:
  if (args != stack) PyMem_Free(args);
  return result;
}

static int as_entry(PyObject* address, entry* fn) {
  void* p = PyLong_AsVoidPtr(address);
  if (p == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the function's address is 0");
    return -1;
  }
  *fn = (entry)p;
  return 0;
}

static PyObject* launch(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  (void)self;
  entry fn;
  if (count < 1) {
    PyErr_SetString(PyExc_TypeError, "launch(fn_address, *ints)");
    return NULL;
  }
  if (as_entry(values[0], &fn) < 0) return NULL;
  return call_entry(fn, values + 1, count - 1);
}

static PyObject* bound_call(PyObject* self, PyObject* const* values, size_t nargsf, PyObject* names) {
  Bound* bound = (Bound*)self;
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (names != NULL && PyTuple_GET_SIZE(names) != 0) {
    PyErr_SetString(PyExc_TypeError, "a bound function takes no keyword arguments");
    return NULL;
  }
  if (count != bound->count) {
    PyErr_Format(PyExc_TypeError, "expected %zd integers, got %zd", bound->count, count);
    return NULL;
  }
  return call_entry(bound->fn, values, count);
}

static void bound_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef bound_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Bound, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot bound_slots[] = {
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, bound_members},
    {0, NULL},
};

static PyType_Spec bound_spec = {
    "dicp_launcher.Bound",
    sizeof(Bound),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    bound_slots,
};

typedef struct {
  PyTypeObject* bound_type;
} State;

static PyObject* bind(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  entry fn;
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "bind(fn_address, n)");
    return NULL;
  }
  if (as_entry(values[0], &fn) < 0) return NULL;
  Py_ssize_t n = PyLong_AsSsize_t(values[1]);
  if (n == -1 && PyErr_Occurred()) return NULL;
  PyTypeObject* type = ((State*)PyModule_GetState(self))->bound_type;
  Bound* bound = (Bound*)type->tp_alloc(type, 0);
  if (bound == NULL) return NULL;
  bound->vectorcall = bound_call;
  bound->fn = fn;
  bound->count = n;
  return (PyObject*)bound;
}

static PyMethodDef functions[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(fn_address, *ints) -> int"},
    {"bind", (PyCFunction)(void (*)(void))bind, METH_FASTCALL, "bind(fn_address, n) -> callable of n ints"},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject* module) {
  State* state = (State*)PyModule_GetState(module);
  state->bound_type = (PyTypeObject*)PyType_FromModuleAndSpec(module, &bound_spec, NULL);
  return state->bound_type == NULL ? -1 : 0;
}

static int visit_state(PyObject* module, visitproc visit, void* arg) {
  State* state = (State*)PyModule_GetState(module);
  if (state != NULL) Py_VISIT(state->bound_type);
  return 0;
}

static int clear_state(PyObject* module) {
  State* state = (State*)PyModule_GetState(module);
  if (state != NULL) Py_CLEAR(state->bound_type);
  return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "dicp_launcher",
    "Calls compiled entries by address.",
    sizeof(State),
    functions,
    slots,
    visit_state,
    clear_state,
    NULL,
};

PyMODINIT_FUNC PyInit_dicp_launcher(void) { return PyModuleDef_Init(&definition); }
