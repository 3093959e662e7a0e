"""What is known of the GPU and asked of its driver: devices, tensor maps."""
