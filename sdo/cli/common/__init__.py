"""What commands share: options, outputs, the words of the terminal."""
