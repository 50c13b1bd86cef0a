"""What happens beside the device: command lines, files, messages, versions."""
