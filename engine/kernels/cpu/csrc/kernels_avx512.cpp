// The avx512 instruction set; its compiler flags stand in setup.py.
namespace {
bool is_supported() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma"); }
}  // namespace

#define DT_NAME "avx512-vnni"
#define DT_TABLE avx512_kernels
#define DT_SUPPORTED is_supported
#include "kernel_set.inl"
