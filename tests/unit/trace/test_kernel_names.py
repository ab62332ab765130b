"""What kernels of communication libraries are, by their names."""

import pytest

from gpurun.launcher.trace.kineto.classify import GpuKind, collective_kind, gpu_kind


@pytest.mark.parametrize(
    "name",
    [
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs4K)",
        "ncclSymDevKernel_AllReduce_AGxLL_R_Sum_bf16(ncclSymDevArgs)",
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8, true>(AllReduceParams)",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel<float, 2>(AllReduceParams)",
        "void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<8, half>(AllReduceKernelParams)",
        "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<half, 4>>(half const*)",
        "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(float*)",
    ],
)
def test_kernels_of_other_libraries_are_communication(name: str) -> None:
    assert (gpu_kind("kernel", name), collective_kind(name)) == (GpuKind.COMM, "all_reduce")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*, long*)", "all_to_all"),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)", "all_to_all"),
        ("void dpsk::ep::internode::cached_notify<false>(int, int, int)", "barrier"),
        ("void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, long*)", "barrier"),
        ("void deep_ep::legacy::internode_ll::dispatch<true, 7168>(void*, float*)", "all_to_all"),
        ("void deep_ep::intranode::barrier<8>(int**, int)", "barrier"),
        ("void mscclpp::executionKernel<__half, mscclpp::LL16Packet>(int, __half*)", "other"),
        ("void flashinfer::trtllm_alltoall::moeAllToAllKernel<true>(MoeEpWorldInfo)", "all_to_all"),
        (
            "void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(aiter::RankData*)",
            "reduce_scatter",
        ),
        ("void barrier_on_stream_kernel_threadgroup<nvshmemi_threadgroup_block>(int)", "barrier"),
    ],
)
def test_kernels_that_exchange_data_or_meet(name: str, kind: str) -> None:
    assert (gpu_kind("kernel", name), collective_kind(name)) == (GpuKind.COMM, kind)


@pytest.mark.parametrize(
    "name",
    [
        "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)",
        "void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*, int*)",
        "void gather_tokens<4>(dpsk::ep::internode::SourceMeta const*)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 4>(int)",
    ],
)
def test_kernels_of_one_rank_alone_are_compute(name: str) -> None:
    assert gpu_kind("kernel", name) == GpuKind.COMPUTE
