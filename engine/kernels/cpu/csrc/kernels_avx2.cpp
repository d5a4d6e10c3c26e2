// The avx2 instruction set; its compiler flags stand in setup.py.
namespace {
bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
}  // namespace

#define DT_NAME "avx2"
#define DT_TABLE avx2_kernels
#define DT_SUPPORTED is_supported
#include "kernel_set.inl"
