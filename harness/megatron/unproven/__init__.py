"""Parts of a step that can be tested fully only on a GPU, with the settings that use them and their test commands.

    row_graph       parallel.cuda_graphs                        pytest tests/gpu -k replayed
    user_buffers    parallel.overlap_tensor_parallel            pytest tests/gpu -k overlap
    moments         optimizer.moments_dtype, optimizer.offload  pytest tests/gpu -k smaller_optimizer
    (streams)       parallel.overlap_experts                    pytest tests/gpu -k travel
    (Megatron's)    parallel.delay_weight_gradients             pytest tests/gpu -k travel

Tests on a CPU run them with stand-ins for the functions of a GPU. Without these settings, a step does not use them.
"""
