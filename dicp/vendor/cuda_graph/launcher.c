/* Calls cuLaunchKernelEx for kernels whose grid does not vary, with Python ints as arguments and the GIL released: what
   launch.GpuKernel does, without Python in it. What it does not know goes to that. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

enum { DEVICES = 16, PARAMETERS = 128, HEAD = 3 };
enum { WIDE = 1, ALONE = 2 }; /* how a launch is: with wide positions; not before all that comes before has ended */

/* As cuda.h has them: CUlaunchAttribute and CUlaunchConfig. */
typedef struct {
  int id;
  char padding[8 - sizeof(int)];
  union {
    int allowed;
    char all[64];
  } value;
} Attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
} Configuration;

enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

typedef int (*launch_kernel)(const Configuration*, void*, void**, void**);

typedef struct {
  void* function;
  unsigned threads, shared;
  Py_ssize_t parameters; /* arguments, and scratch memory behind them that is null */
  int waits;             /* by itself, for the kernel before: it may be launched while that one runs */
} Variant;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  launch_kernel launch;
  PyObject* slow; /* kernel(device, stream, how, *arguments), which also makes variants and says what failed */
  Py_ssize_t pointers, arguments;
  unsigned programs;
  Variant variants[DEVICES][2][2]; /* by device, aligned pointers, wide positions */
} Kernel;

/* The variant that a call is for, and its arguments; NULL, perhaps with an error set, where that is not known. */
static const Variant* variant_of(Kernel* kernel, PyObject* const* values, Py_ssize_t count, int64_t* arguments,
                                 long* how) {
  if (count != HEAD + kernel->arguments) return NULL;
  const long device = PyLong_AsLong(values[0]);
  *how = PyLong_AsLong(values[2]);
  if (*how == -1 && PyErr_Occurred()) return NULL;
  if (device < 0 || device >= DEVICES) return NULL;
  int64_t low = 0;
  for (Py_ssize_t i = 0; i < kernel->arguments; ++i) {
    arguments[i] = (int64_t)PyLong_AsLongLong(values[HEAD + i]);
    if (arguments[i] == -1 && PyErr_Occurred()) return NULL;
    if (i < kernel->pointers) low |= arguments[i];
  }
  const Variant* variant = &kernel->variants[device][low % 16 == 0][*how & WIDE];
  return variant->function != NULL ? variant : NULL;
}

static PyObject* kernel_call(PyObject* self, PyObject* const* values, size_t nargsf, PyObject* names) {
  Kernel* kernel = (Kernel*)self;
  int64_t arguments[PARAMETERS];
  void* parameters[PARAMETERS];
  long how = 0;
  const Variant* variant = names ? NULL : variant_of(kernel, values, PyVectorcall_NARGS(nargsf), arguments, &how);
  if (variant != NULL) {
    void* stream = PyLong_AsVoidPtr(values[1]);
    for (Py_ssize_t i = 0; i < variant->parameters; ++i) {
      if (i >= kernel->arguments) arguments[i] = 0;
      parameters[i] = &arguments[i];
    }
    if (!PyErr_Occurred()) {
      Attribute early = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.allowed = 1};
      const Configuration configuration = {{kernel->programs, 1, 1}, {variant->threads, 1, 1},
                                           variant->shared,          stream,
                                           &early,                   variant->waits && !(how & ALONE)};
      int code;
      Py_BEGIN_ALLOW_THREADS
      code = kernel->launch(&configuration, variant->function, parameters, NULL);
      Py_END_ALLOW_THREADS
      if (code == 0) Py_RETURN_NONE;
    }
  }
  if (PyErr_Occurred()) return NULL;
  return PyObject_Vectorcall(kernel->slow, values, nargsf, names);
}

/* note(device, aligned, wide, function, threads, shared, parameters, waits): from now on this is launched. Others go on to
   Python: more parameters than PARAMETERS, devices beyond DEVICES. */
static PyObject* kernel_note(PyObject* self, PyObject* args) {
  long long device, parameters;
  int aligned, wide, waits;
  unsigned threads, shared;
  PyObject* function;
  if (!PyArg_ParseTuple(args, "LppOIILp", &device, &aligned, &wide, &function, &threads, &shared, &parameters, &waits))
    return NULL;
  void* address = PyLong_AsVoidPtr(function);
  if (address == NULL && PyErr_Occurred()) return NULL;
  if (device >= 0 && device < DEVICES && parameters <= PARAMETERS)
    ((Kernel*)self)->variants[device][aligned][wide] = (Variant){address, threads, shared, (Py_ssize_t)parameters, waits};
  Py_RETURN_NONE;
}

static int kernel_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((Kernel*)self)->slow);
  return 0;
}

static int kernel_clear(PyObject* self) {
  Py_CLEAR(((Kernel*)self)->slow);
  return 0;
}

static void kernel_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  kernel_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef kernel_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Kernel, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef kernel_methods[] = {
    {"note", kernel_note, METH_VARARGS, "note(device, aligned, wide, function, threads, shared, parameters, waits)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_dealloc, kernel_dealloc}, {Py_tp_traverse, kernel_traverse}, {Py_tp_clear, kernel_clear},
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, kernel_members},   {Py_tp_methods, kernel_methods},
    {0, NULL},
};

static PyType_Spec kernel_spec = {
    "dicp_cuda_launcher.Kernel",
    sizeof(Kernel),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    kernel_slots,
};

/* kernel(launch_address, slow, pointers, arguments, programs), or None where there are too many arguments */
static PyObject* make_kernel(PyObject* module, PyObject* args) {
  PyObject *launch, *slow;
  Py_ssize_t pointers, arguments;
  unsigned programs;
  if (!PyArg_ParseTuple(args, "OOnnI", &launch, &slow, &pointers, &arguments, &programs)) return NULL;
  void* address = PyLong_AsVoidPtr(launch);
  if (address == NULL && PyErr_Occurred()) return NULL;
  if (arguments > PARAMETERS) Py_RETURN_NONE;
  PyTypeObject* type = *(PyTypeObject**)PyModule_GetState(module);
  Kernel* kernel = (Kernel*)type->tp_alloc(type, 0); /* of zeros */
  if (kernel == NULL) return NULL;
  kernel->vectorcall = kernel_call;
  kernel->launch = (launch_kernel)address;
  kernel->slow = Py_NewRef(slow);
  kernel->pointers = pointers;
  kernel->arguments = arguments;
  kernel->programs = programs;
  return (PyObject*)kernel;
}

static PyMethodDef functions[] = {
    {"kernel", make_kernel, METH_VARARGS, "kernel(launch_address, slow, pointers, arguments, programs)"},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject* module) {
  PyObject** type = (PyObject**)PyModule_GetState(module);
  *type = PyType_FromModuleAndSpec(module, &kernel_spec, NULL);
  return *type == NULL ? -1 : 0;
}

static int visit_state(PyObject* module, visitproc visit, void* arg) {
  PyObject** type = (PyObject**)PyModule_GetState(module);
  if (type != NULL) Py_VISIT(*type);
  return 0;
}

static int clear_state(PyObject* module) {
  PyObject** type = (PyObject**)PyModule_GetState(module);
  if (type != NULL) Py_CLEAR(*type);
  return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dicp_cuda_launcher", "Launches kernels whose grid does not vary.",
    sizeof(PyObject*),     functions,            slots,
    visit_state,           clear_state,          NULL,
};

PyMODINIT_FUNC PyInit_dicp_cuda_launcher(void) { return PyModuleDef_Init(&definition); }
