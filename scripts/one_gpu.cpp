// A CUDA device that exists in PyTorch's books alone: with it a CPU build traces programs of a GPU, gradients
// included, on fake tensors. To be loaded before torch (see gpu_kernels.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

// Autograd's engine and TensorIterator set devices and streams, of which there is one.
struct OneDevice final : c10::impl::DeviceGuardImplInterface {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};

// The engine asks for the accelerator, and whether it is in use already.
struct CUDAHooks final : at::CUDAHooksInterface {  // the registry knows it by this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

// Which attention scaled_dot_product_attention is: roughly as on a device of capability 8.0 and up.
int64_t attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor&,
                  const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool grouped = query.size(1) != key.size(1);
  if (half && !mask.has_value() && query.size(-1) <= 256) return int64_t(sdp::SDPBackend::flash_attention);
  return int64_t(grouped ? sdp::SDPBackend::math : sdp::SDPBackend::efficient_attention);
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, OneDevice);

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &attention)
}
}  // namespace at
