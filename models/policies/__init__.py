"""Cache policies for diffusion decoding, exact and approximate, behind one interface and counted by one harness.

Two kinds of denoisers are decoded here. A *bidirectional* one (`block: row`) sees its whole canvas, prompt and masks, so
whatever is kept of an earlier step is stale as soon as a token is revealed: that is what most published caches are about.
A *block-causal* one sees committed blocks, which never change, and its own frontier block: its cache of the prefix is
exact, and what is left to decide is what to share, what to evict, and what to keep inside the block.

Both run through the same parts:

- a *canvas* (canvas.py): tokens with positions, of which a run of columns is being revealed, and per layer *segments* of
  keys and values that stand outside of it (an exact prefix, a shared affix, packets);
- a *memory* (memory.py): keys and values of the canvas's columns per layer, and where a policy asks for it the hidden
  states or the changes that every layer made to them;
- a *step* (step.py): one pass of some columns, the queries, through all layers. Their keys and values replace those in
  memory; all others are read as they stand. A policy may choose other columns at every layer, having looked at what the
  layer is given;
- a *policy* (interface.py): frozen parameters without state. It says which columns are queries (nothing refreshed, all,
  layers from l on, a set of tokens, prompt or response), what of a canvas stands outside, and what is evicted. What it
  remembers is a value that the harness passes back to it;
- the *harness* (bidirectional.py, causal.py, over reveal_canvas in loop.py): the only decode loops. It counts passes,
  recomputed tokens, bytes held and what decisions cost (cost.py), and echoes the parameters in effect.

| policy | file | denoiser | kept from step to step | exact where |
|---|---|---|---|---|
| none | none.py | both | nothing of the canvas | always |
| entropy | entropy_cache.py | bidirectional | all columns; recomputed when an entropy is high | threshold < 0 |
| dllm | dllm_cache.py | bidirectional | all; prompt, response at intervals, the most changed between | intervals 1 |
| fast | fast_dllm.py | both | prefix, or prefix and suffix, from the start of a block | refresh 1 |
| polestar | polestar.py | bidirectional | all; tokens of the clusters whose attention drifted | all clusters, every step |
| acache | acache.py | bidirectional | an affix computed alone, shared; its anchors per request | ratio 1, refresh 1 |
| bicache | bicache.py | bidirectional | a prefix computed alone, in the first layers | 0 layers, interval 1 |
| packet | kv_packet.py | both | documents computed alone between trained soft tokens | never: trained |
| fork | shared_prefix.py | block-causal | the exact state of a shared prefix, held once | always |
| drop | drop_kv.py | block-causal | the committed keys that matter most | keep 1 |

A policy of a file to come has these hooks: queries at any positions (step.py), attention rows and log-sum-exp
(`forward.attend`), attention put together from parts or over chosen keys, layer by layer (`attention`), the value
projection alone and keys of any columns (`Look`), keys before their rotation and rotated again elsewhere
(`Segment.tables`), other columns or keys at every layer (`at_layer`, `Segment.seen`, `evict`), hidden states per layer
(`carry`), forks of a state (`Past.fork`).
"""
