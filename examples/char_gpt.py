"""A sparse character-level GPT, trained on the Declaration of Independence, which then continues a text."""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import models

TEXT = Path(__file__).with_name("declaration.txt")


def batch(tokens: Tensor, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same one character later."""
    starts = torch.randint(len(tokens) - context, (size,))
    places = starts[:, None] + torch.arange(context)
    return tokens[places], tokens[places + 1]


@torch.no_grad()
def write(model: nn.Module, tokens: Tensor, count: int, context: int) -> Tensor:
    """So many more characters, drawn one by one."""
    model.eval()
    for _ in range(count):
        logits = model(tokens[None, -context:])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(0), 1)])
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--characters", type=int, default=300, help="to write in the end")
    options = parser.parse_args()
    torch.manual_seed(0)

    text = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])

    model = models.gpt(
        len(alphabet), options.context, options.width, options.depth, heads=4, dropout=0.1
    )
    model = rewire.sparsify(model, options.sparsity, assignment="uniform", keep_dense="head")
    rewire.summary(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    rewirer = rewire.GSE(model, optimizer, every=10, until=max(10, options.steps * 3 // 4))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, options.steps)

    begun = time.perf_counter()
    for step in range(1, options.steps + 1):
        x, y = batch(tokens, 32, options.context)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rewirer.step()
        scheduler.step()
        if step % max(1, options.steps // 10) == 0:
            seconds = time.perf_counter() - begun
            print(f"step {step}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)

    start = tokens[: options.context]
    written = write(model, start, options.characters, options.context)
    print("".join(alphabet[token] for token in written))


if __name__ == "__main__":
    main()
