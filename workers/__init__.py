"""Workers: one process per rank; each runs the nodes placed on it.

process     the process: joins, beats, leaves
model       what it hosts, loaded beside the event loop
read_ahead  weights on their way into memory while torch is imported
life        what each process does for its life on the log
group       who shares a node, and how they find one another
following   the process of a rank that follows another
inbox       which orders in the log are for this life, each once       pure
lives       which life of each rank is the present one                 pure
early       edges that are earlier than their order                    pure
executor    runs orders, and reports how they ended
placed      an order's walks, and which rank runs what of them         pure
chain       one order: the dataflow of its walks, here and as other ranks tell it
nodes       a step's nodes on this rank: a firing to its engine, an outcome back
outcome     what a firing came to                                      pure
sequences   a step's rows: begun, gone on with, handed over
rows        the event loop's side of the engine's sequences
tensors     a step's tensors: made, read, checked, freed
streaming   a step's side of the streams: values to items
streams     an attempt's streams, as far as this rank has an end of them
inlet       the consumer's end: items to chunks, and credits           pure
outlet      the producer's end: items out, as far as there is credit
tracks      what a step puts out, by the node that speaks
recall      where a request's output stands, by the log                pure
echo        the prompt, put out before its answer                      pure
states      an embedding, or hidden states, as chunks                  pure
answer      tokens to text, and when it ends                           pure
stop        stop strings                                               pure
output      text and tokens to chunks, coalesced                       pure, but for a timer
writer      signs and numbers what is written
settings    `model_kwargs`, checked                                    pure
pool_size   how large the KV pool is                                   pure
memory      how much memory there is
devices     which device a rank computes on                            torch
hosting     nodes on their device, and the engines that run them       torch
arrays      tensors to bytes and back                                  torch
imports     transformers, without what nobody uses of it               torch
engine/     the KV-cache engine and its thread                         torch
kernels/    layers on CPUs, in C++
stateless/  the stateless engine and its thread                        torch
data_plane/ tensors on their way from worker to worker

No torch on the event loop's side: the engines' threads import it while the process already beats.
"""
