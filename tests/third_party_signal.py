"""A signal that others might add, written with the promised names alone; tests put it through every door."""

from diagnostics import Signal
from diagnostics.signals import SampleVectors
from sdo import InputError


class Embedded(Signal):
    """The gradient at the input embeddings' output, summed over a sample's positions."""

    word = "embedded"
    silent = "the input embeddings are frozen"

    def of(self, context):
        module = context.model.get_input_embeddings()
        if self.target is not None:
            raise InputError(f"embedded got the target {self.target!r}; expected none")
        return EmbeddedCapture(self, context, module.embedding_dim)


class EmbeddedCapture(SampleVectors):
    def register(self):
        self._handles = [self.context.model.get_input_embeddings().register_forward_hook(self.on_forward)]

    def on_forward(self, module, args, output):
        _, micros = self.context.current()
        if micros and output.requires_grad:
            micro = micros[-1]
            output.register_hook(lambda grad: self.add(micro, grad.sum(dim=1)))

    def needed_parameters(self):
        return [self.context.model.get_input_embeddings().weight]
