"""SmolLM2-135M-Instruct on GSM8K: a uniform and an SDO run, recorded and compared."""
