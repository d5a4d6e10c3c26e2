// The portable instruction set; its compiler flags stand in setup.py.
namespace {
bool is_supported() { return true; }
}  // namespace

#define DT_NAME "portable"
#define DT_TABLE portable_kernels
#define DT_SUPPORTED is_supported
#include "kernel_set.inl"
