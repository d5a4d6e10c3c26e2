// The C ABI (mirrored in library.py). Functions that can fail return null or false and keep a text.
#include <exception>
#include <string>

#include "runner.h"

namespace {

thread_local std::string last_error;

const dovetail::KernelTable* tables[] = {
#if defined(__x86_64__)
    dovetail::avx512_kernels(),
    dovetail::avx2_kernels(),
#endif
    dovetail::portable_kernels(),
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Raised with every change of a struct or of what a function means.
int32_t dovetail_abi_version() { return 4; }

const char* dovetail_error() { return last_error.c_str(); }

// Sets that this processor runs, best first; null behind the last.
const dovetail::KernelTable* dovetail_kernels(int32_t index) {
  for (const auto* table : tables)
    if (table->is_supported() && index-- == 0) return table;
  return nullptr;
}

dovetail::Runner* dovetail_runner_new(const dovetail::KernelTable* kernels,
                                      const dovetail::ModelShape* shape, int32_t num_threads) {
  try {
    return new dovetail::Runner(*kernels, *shape, num_threads);
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

void dovetail_runner_delete(dovetail::Runner* runner) { delete runner; }

bool dovetail_forward(dovetail::Runner* runner, const dovetail::StepInputs* inputs) {
  try {
    runner->forward(*inputs);
    return true;
  } catch (const std::exception& error) {
    last_error = error.what();
    return false;
  }
}

// The draws of the last forward pass, to be refined before `dovetail_draw`.
dovetail::DrawItem* dovetail_draws(dovetail::Runner* runner) { return runner->draws(); }

bool dovetail_draw(dovetail::Runner* runner, dovetail::StepOutputs* outputs) {
  try {
    *outputs = runner->draw();
    return true;
  } catch (const std::exception& error) {
    last_error = error.what();
    return false;
  }
}

// [vocab_size] of a selected row of the last forward pass.
const float* dovetail_logits(dovetail::Runner* runner, int32_t row) { return runner->logits(row); }

}  // extern "C"
#pragma GCC visibility pop
