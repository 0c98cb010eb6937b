"""Equal time, same sizes, same corpus: who predicts held-out text better, and after how long?

    python benchmarks/race.py RECIPE --heldout HELDOUT.jsonl.gz --minutes 20 --out race

The recipe names corpus, tokenizer, network, batch, and how modicum trains. Each peer (a Llama of the same sizes in a
plain script, so without QK-norm: AdamW 0.9/0.95, decay 0.1, cosine to 0 after 2 % warm-up) first runs --sweep-minutes
at each learning rate of --sweep; its best one is raced. Each leg is a process of its own with empty caches; its clock
includes building, compiling, and measuring which attention is fastest, but not the import of packages, save what
torch.compile brings in. Learning rates run over the time after the first update, which is the one that compiles. All
snapshots are scored by modicum's bits per byte, whose protocol evaluate/bits.py states: each document by itself. So
modicum learns too, while the peers' rows run across the borders of documents, as plain scripts have it. Writes
race.json, race.png and prints the table. Rows besides modicum and its peers: modicum with a third of the time, and the
first peer with modicum's allocator settings, so that one sees what those alone bring.
"""

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from safetensors.torch import load_file

import modicum
from modicum.bench.systems import Ours, Peer
from modicum.corpus import Document
from modicum.data import open_shards
from modicum.evaluate import bits_per_byte
from modicum.model import Decoder, ModelConfig, parameters_by_part
from modicum.recipe import Recipe, load_recipe
from modicum.road.machine import describe_machine
from modicum.store import UserError
from modicum.tokenizer import Tokenizer, load_tokenizer
from modicum.train import OptimizerSettings


class Race:
    """The corpus made ready, and one leg after the other on it."""

    def __init__(self, recipe: Recipe, *, heldout: Path, tokens: int, points: int, out: Path) -> None:
        self.recipe, self.points, self.out = recipe, points, out
        run = recipe.output / recipe.name
        self.tokenizer: Tokenizer = load_tokenizer(run / "tokenizer" / "files", missing="keep")
        open_shards(run / "shards" / "train", tokenizer_hash=self.tokenizer.hash)
        self.config = ModelConfig.from_settings(recipe.model, self.tokenizer.vocab_size)
        self.heldout, self.heldout_tokens = list(read_heldout(heldout)), tokens
        out.mkdir(parents=True, exist_ok=True)
        self._same: dict[str, Any] = {
            "config": asdict(self.config),
            "shards": str(run / "shards" / "train"),
            "tokenizer_hash": self.tokenizer.hash,
            "rows": recipe.pretrain.batch_size,
            "length": recipe.pretrain.sequence_length,
            "seed": recipe.seed,
            "code": hash_of_code(),
            "machine": describe_machine().line(),
            "heldout": [hashlib.sha256(heldout.read_bytes()).hexdigest(), tokens],
        }

    def ours(self, name: str, end: dict[str, Any]) -> dict[str, Any]:
        """modicum as the recipe's pretrain section says."""
        p = self.recipe.pretrain
        optimizer = OptimizerSettings(
            p.optimizer,
            p.weight_decay,
            p.betas,
            p.epsilon,
            p.momentum,
            p.clip_norm,
            embedding_factor=p.embedding_learning_rate_factor,
        )
        schedule = {
            "kind": p.schedule,
            "peak": p.learning_rate,
            "final_fraction": p.final_learning_rate_fraction,
            "warmup_fraction": p.warmup_fraction,
            "decay_fraction": p.decay_fraction,
        }
        system = Ours(p.dtype, optimizer, p.activation_checkpointing, p.micro_batch_size)
        return self._leg(name, {"ours": asdict(system), "schedule": schedule, "points": self.points, **end})

    def peer(self, name: str, peer: Peer, rate: float, end: dict[str, Any], points: int) -> dict[str, Any]:
        config = replace(self.config, qk_norm=False)
        order = {"config": asdict(config), "peer": asdict(peer), "schedule": {"kind": "cosine", "peak": rate}}
        return self._leg(name, {**order, "points": points, **end})

    def best_rate(self, peer: Peer, rates: list[float], end: dict[str, Any]) -> float:
        """The learning rate whose short run ends with the fewest bits per byte."""
        scores = {
            rate: self.peer(f"{peer.name} sweep {rate:g}", peer, rate, end, points=1)["points"][-1]["bits_per_byte"]
            for rate in rates
        }
        return min(scores, key=lambda rate: scores[rate])

    def _leg(self, name: str, order: dict[str, Any]) -> dict[str, Any]:
        """Run it, score its snapshots; what was measured before is read again."""
        known = self.out / f"{name.replace(' ', '-')}.json"
        order = json.loads(json.dumps({**self._same, **order}))  # as it is read again, without tuples
        if known.exists() and (found := json.loads(known.read_text()))["order"] == order:
            return dict(found)
        print(f"{name} ...", file=sys.stderr, flush=True)
        leg = Path(__file__).with_name("race_leg.py")
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled", "XDG_CACHE_HOME": folder}
            done = subprocess.run(
                [sys.executable, leg],
                input=json.dumps({**order, "out": folder}),
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                env=environment,
            )
            if done.returncode:
                raise UserError(f"{name}: the leg ended with status {done.returncode}")
            answer = {"name": name, "order": order, **json.loads(done.stdout.splitlines()[-1])}
            for point in answer["points"]:
                point |= self._score(Path(folder) / point.pop("file"), ModelConfig(**order["config"]))
        known.write_text(json.dumps(answer, indent=1))
        print(f"{name}: {answer['said']}, {answer['points'][-1]['bits_per_byte']:.3f}", file=sys.stderr, flush=True)
        return answer

    def _score(self, weights: Path, config: ModelConfig) -> dict[str, float | None]:
        model = Decoder(config)
        model.load_state_dict(load_file(weights))
        found = bits_per_byte(
            model,
            self.tokenizer,
            self.heldout,
            context=self.recipe.pretrain.sequence_length,
            max_tokens=self.heldout_tokens,
            bfloat16=True,
        ).total
        return {"bits_per_byte": found.value, "low": found.low, "high": found.high}


def hash_of_code() -> str:
    """Of all that a leg runs of modicum's, so that another version answers no leg with an old one's figures."""
    files = [*sorted(Path(modicum.__file__).parent.rglob("*.py")), Path(__file__).with_name("race_leg.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def read_heldout(path: Path) -> Iterator[Document]:
    """The documents of a (gzipped) JSON-lines file with the fields text, source and licence."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines):
            record = json.loads(line)
            yield Document(str(number), record["text"], record["source"], record["source"], record.get("licence"))


def seconds_to(points: list[dict[str, Any]], bits: float) -> float | None:
    """When a curve first reaches `bits`, on straight lines between its points; None where it never does."""
    before: dict[str, Any] | None = None
    for point in points:
        if point["bits_per_byte"] <= bits:
            if before is None:
                return float(point["seconds"])
            share = (before["bits_per_byte"] - bits) / (before["bits_per_byte"] - point["bits_per_byte"])
            return float(before["seconds"] + share * (point["seconds"] - before["seconds"]))
        before = point
    return None


def table(legs: list[dict[str, Any]]) -> list[str]:
    """One row a leg; the last column: how soon modicum's full leg was as good as that leg's end, of that leg's time."""
    ours = next(leg for leg in legs if leg["name"] == "modicum")
    lines = [
        "| system | learning rate | time | tokens | tokens/s | bits per byte | 95 % | peak MB | modicum was there |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for leg in legs:
        end, rate = leg["points"][-1], leg["order"]["schedule"]["peak"]
        there = seconds_to(ours["points"], end["bits_per_byte"])
        soon = "" if leg is ours else "never" if there is None else f"after {there / end['seconds']:.0%} of the time"
        span = "" if end["low"] is None else f"{end['low']:.3f} to {end['high']:.3f}"
        lines.append(
            f"| {leg['name']}, {leg['mode']} | {rate:g} | {end['seconds'] / 60:.1f} min | {end['tokens'] / 1e6:.2f} M "
            f"| {end['tokens'] / end['seconds']:,.0f} | {end['bits_per_byte']:.3f} "
            f"| {span} | {leg['peak_rss_mb']:,.0f} | {soon} |"
        )
    return lines


def plot(legs: list[dict[str, Any]], path: Path) -> None:
    """Bits per byte over minutes on the clock."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for leg in legs:
        minutes = [point["seconds"] / 60 for point in leg["points"]]
        axes.plot(minutes, [point["bits_per_byte"] for point in leg["points"]], marker="o", label=leg["name"])
    axes.set(xlabel="minutes, compiling included", ylabel="bits per byte of held-out text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--heldout-tokens", type=int, default=60_000)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--points", type=int, default=12, help="snapshots of a leg that is raced")
    parser.add_argument("--sweep-minutes", type=float, default=4)
    parser.add_argument("--sweep", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3])
    parser.add_argument("--peer", choices=("transformers", "litgpt"), nargs="*", default=["transformers"])
    parser.add_argument("--peer-mode", choices=("eager", "compile"), default="compile")
    parser.add_argument("--only-ours", action="store_true", help="modicum's leg alone, to try settings")
    parser.add_argument("--updates", type=int, help="end a leg after so many updates, on a machine that is not quiet")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    prepare = [sys.executable, "-m", "modicum", "prepare", str(given.recipe)]
    subprocess.run([*prepare, *(x for s in given.set for x in ("--set", s))], check=True, stdout=sys.stderr)
    race = Race(
        load_recipe(given.recipe, given.set),
        heldout=given.heldout,
        tokens=given.heldout_tokens,
        points=given.points,
        out=given.out,
    )
    end: dict[str, Any] = {"updates": given.updates} if given.updates else {"seconds": given.minutes * 60}
    legs = [race.ours("modicum", end)]
    if not given.only_ours:
        short = {"seconds": given.sweep_minutes * 60}
        peers = {name: Peer(name, given.peer_mode) for name in given.peer}
        rates = {name: race.best_rate(peer, given.sweep, short) for name, peer in peers.items()}
        legs.append(race.ours("modicum, a third", {name: value / 3 for name, value in end.items()}))
        legs += [race.peer(name, peer, rates[name], end, given.points) for name, peer in peers.items()]
        for name, peer in list(peers.items())[:1]:
            tuned = Peer(name, peer.mode, our_allocator=True)
            legs.append(race.peer(f"{name}, our allocator", tuned, rates[name], end, given.points))
    lines = table(legs)
    record = {"network": f"{parameters_by_part(race.config).total:,} parameters", "machine": describe_machine().line()}
    (given.out / "race.json").write_text(json.dumps({**record, "legs": legs}, indent=1))
    plot(legs, given.out / "race.png")
    print("\n".join([f"{record['network']}, {record['machine']}", "", *lines]))


if __name__ == "__main__":
    main()
