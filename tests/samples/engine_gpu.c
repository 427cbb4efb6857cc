/* An H100 for programs that only ask what a GPU is: preloaded, it answers for the CUDA runtime. Nothing can run on it. */
#include <dlfcn.h>
#include <string.h>

/* Place of the compute capability in cudaDeviceProp of CUDA 12 and 13. */
enum { CAPABILITY_AT = 360, MAJOR = 75, PROCESSORS = 16 };

static int describe(char *properties) {
  static const int capability[2] = {9, 0};
  memset(properties, 0, CAPABILITY_AT);
  memcpy(properties + CAPABILITY_AT, capability, sizeof capability);
  return 0;
}

int cudaGetDeviceProperties(char *properties, int device) { return describe(properties); }
int cudaGetDeviceProperties_v2(char *properties, int device) { return describe(properties); }

int cudaGetDevice(int *device) {
  *device = 0;
  return 0;
}

int cudaGetDeviceCount(int *count) {
  *count = 1;
  return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == MAJOR ? 9 : attribute == PROCESSORS ? 132 : 0;
  return 0;
}

static int current_context(void **context) {
  static int one;
  *context = &one;
  return 0;
}

static int current_device(int *device) { return cudaGetDevice(device); }
static int do_nothing(void) { return 0; }

static int entry_point(const char *name, void **function) {
  *function = !strcmp(name, "cuCtxGetCurrent")  ? (void *)current_context
              : !strcmp(name, "cuCtxGetDevice") ? (void *)current_device
                                                : (void *)do_nothing;
  return 0;
}

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
  if (status) *status = 0;
  return entry_point(name, function);
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
  return cudaGetDriverEntryPoint(name, function, flags, status);
}

/* Python opens libraries at once; one that wants functions of a newer cuBLAS opens only by and by. */
void *open_lazily(const char *path) { return dlopen(path, RTLD_LAZY | RTLD_GLOBAL); }
