// Attention as Python sees it, and copies of blocks.
#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../bindings.h"
#include "gathered.h"
#include "prompts.h"
#include "relative.h"

namespace octavo {

namespace avx2 { extern const AttentionKernels attention_table; }
namespace avx512 { extern const AttentionKernels attention_table; }
namespace avx512_bf16 { extern const AttentionKernels attention_table; }
namespace amx { extern const AttentionKernels attention_table; }
namespace amx_emulated { extern const AttentionKernels attention_table; }

const AttentionKernels& attention_kernels(Level level) {
  return choose_table(level, avx2::attention_table, avx512::attention_table, avx512_bf16::attention_table,
                      amx::attention_table, amx_emulated::attention_table);
}

namespace {

struct BlockCopies {
  const std::int64_t* sources;  // [planes] addresses of the blocks to copy from
  const std::int64_t* targets;  // [planes]
  const std::int64_t* pairs;    // [count, 2] source and target block
  int planes, count;
  std::int64_t block_bytes, block_stride;
};

// Within a plane in the order of the list: a copy may read what an earlier one wrote.
void copy_blocks(Cpu& cpu, const BlockCopies& c) {
  cpu.pool.run(c.planes, [&](int plane, int) {
    const auto* source = pointer<std::uint8_t>(static_cast<Address>(c.sources[plane]));
    auto* target = pointer<std::uint8_t>(static_cast<Address>(c.targets[plane]));
    for (int i = 0; i < c.count; ++i)
      std::memmove(target + c.pairs[2 * i + 1] * c.block_stride, source + c.pairs[2 * i] * c.block_stride, c.block_bytes);
  });
}

}  // namespace

void bind_attention(nb::class_<Cpu>& cpu) {
  cpu.def_static(
      "attention_block_bytes",
      [](int kv_heads, int dim, int value_dim, int block_size, int cache_type) {
        return layout_of(kv_heads, dim, value_dim, block_size, static_cast<Type>(cache_type)).block_bytes;
      },
      "Bytes of one block of one layer's cache; block_size is a multiple of 16, value_dim 0 unless it keeps latents.");
  cpu.def(
      "attention_scratch_bytes",
      [](const Cpu& cpu, int heads, int kv_heads, int dim, int value_dim, int longest, int cache_type) {
        Attention a{};
        a.heads = heads, a.kv_heads = kv_heads, a.dim = dim;
        a.layout = layout_of(kv_heads, dim, value_dim, kTileKeys, static_cast<Type>(cache_type));
        const AttentionKernels& kernels = attention_kernels(cpu.level);
        const std::int64_t rows = partial_rows(a, most_queries_of(a, kernels));
        const std::int64_t partial = partial_floats(a, static_cast<int>(rows)) * static_cast<std::int64_t>(sizeof(float));
        // either two sums for each thread, or one for each split of the few items that are divided
        const std::int64_t splits = (longest + kSplitKeys - 1) / kSplitKeys, threads = cpu.pool.threads();
        return threads * kernels.scratch_bytes(a) + std::max(2 * threads, 4 * threads * splits) * partial;
      },
      "Most bytes that `attention` works in, for sequences of up to `longest` tokens.");
  cpu.def(
      "attention",
      [](Cpu& cpu, Address q, Address k, Address v, Address out, Address cache, Address query_starts,
         Address sequence_lengths, Address block_tables, Address slots, Address alibi, Address sinks,
         std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, std::int64_t table_stride, std::int64_t block_stride, int tokens,
         int rows, int heads, int kv_heads, int dim, int block_size, int type, int cache_type, float scale, int window,
         float soft_cap, int ahead) {
        Attention a{pointer(q), pointer(k), pointer(v), pointer(out), pointer<std::uint8_t>(cache),
                    pointer<std::int32_t>(query_starts), pointer<std::int32_t>(sequence_lengths),
                    pointer<std::int32_t>(block_tables), pointer<std::int64_t>(slots), pointer<float>(alibi), pointer<float>(sinks),
                    q_stride, k_stride, v_stride, table_stride, block_stride, tokens, rows, heads, kv_heads, dim, dim, block_size,
                    static_cast<Type>(type), static_cast<Type>(cache_type), scale, window, ahead, soft_cap,
                    layout_of(kv_heads, dim, 0, block_size, static_cast<Type>(cache_type)), {}, {}};
        cpu.submit([&cpu, a, &kernels = attention_kernels(cpu.level)] { run_attention(cpu, a, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Write keys and values to their slots, then attend over the paged cache; see csrc/cpu/attention/attention.h.");
  cpu.def(
      "distance_attention",
      [](Cpu& cpu, Address q, Address k, Address v, Address out, Address cache, Address table, Address biases, int reach,
         Address lengths, int prompts, std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, int heads,
         int kv_heads, int dim, int type, float scale) {
        Attention a = prompts_attention(q, k, v, out, cache, dim, heads, kv_heads, static_cast<Type>(type), static_cast<Type>(type));
        a.sequence_lengths = pointer<std::int32_t>(lengths);
        a.q_stride = q_stride, a.k_stride = k_stride, a.v_stride = v_stride, a.rows = prompts, a.scale = scale;
        cpu.submit([=, &cpu, &kernels = attention_kernels(cpu.level)] {
          const PromptPlaces places(a.sequence_lengths, prompts);
          Attention own = a;
          own.query_starts = places.starts.data(), own.block_tables = places.tables.data();
          own.slots = places.slots.data(), own.tokens = places.starts.back(), own.table_stride = places.tiles;
          own.biases = spread(pointer<const float>(biases), reach, places.longest, heads, pointer<float>(table));
          run_attention(cpu, own, kernels);
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Attend within whole prompts, scores having a bias by distance; see PromptPlaces for the cache, spread for the table.");
  cpu.def(
      "disentangled_bytes",
      [](const Cpu& cpu, int longest, int places) {
        return cpu.pool.threads() * disentangled_floats(longest, places) * static_cast<std::int64_t>(sizeof(float));
      },
      "Bytes of products with vectors of distances that `disentangled_attention` keeps.");
  cpu.def(
      "disentangled_attention",
      [](Cpu& cpu, Address q, Address k, Address v, Address out, Address cache, Address place_q, Address place_k,
         Address place_q_cache, Address place_k_cache, Address memory, Address places, int reach, int count, Address lengths,
         int prompts, std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, std::int64_t place_q_stride,
         std::int64_t place_k_stride, int heads, int dim, int type, float scale) {
        // products with tiles have no sums of their own for rows that are related
        const Level level = std::min(cpu.level, Level::avx512_bf16);
        const Type own = static_cast<Type>(type), related = level < Level::avx512_bf16 ? Type::float32 : own;
        Attention a = prompts_attention(q, k, v, out, cache, dim, heads, heads, own, own);
        a.sequence_lengths = pointer<std::int32_t>(lengths);
        a.q_stride = q_stride, a.k_stride = k_stride, a.v_stride = v_stride, a.rows = prompts, a.scale = scale;
        Distances d{prompts_attention(0, place_k, place_k, 0, place_k_cache, dim, heads, heads, own, related),
                    prompts_attention(0, place_q, place_q, 0, place_q_cache, dim, heads, heads, own, related),
                    pointer<std::int64_t>(places), reach, count};
        d.of_queries.k_stride = d.of_queries.v_stride = place_k_stride;
        d.of_keys.k_stride = d.of_keys.v_stride = place_q_stride;
        cpu.submit([=, &cpu, &kernels = attention_kernels(level)] {
          const PromptPlaces found(a.sequence_lengths, prompts);
          std::vector<std::int64_t> slots(count);
          for (int i = 0; i < count; ++i) slots[i] = i;
          Attention content = a;
          content.query_starts = found.starts.data(), content.block_tables = found.tables.data();
          content.slots = found.slots.data(), content.tokens = found.starts.back(), content.table_stride = found.tiles;
          Distances distances = d;
          distances.of_queries.slots = distances.of_keys.slots = slots.data();
          run_disentangled(cpu, content, kernels, distances, found.longest, pointer<float>(memory));
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Attend within whole prompts, scores having products with vectors of distances; see Distances.");
  cpu.def(
      "latent_attention",
      [](Cpu& cpu, Address q, Address q_tail, Address k, Address k_tail, Address out, Address cache, Address query_starts,
         Address sequence_lengths, Address block_tables, Address slots, std::int64_t q_stride, std::int64_t q_tail_stride,
         std::int64_t k_stride, std::int64_t k_tail_stride, std::int64_t table_stride, std::int64_t block_stride,
         int tokens, int rows, int heads, int dim, int value_dim, int block_size, int type, int cache_type, float scale) {
        Attention a{};
        a.q = pointer(q), a.k = pointer(k), a.out = pointer(out), a.cache = pointer<std::uint8_t>(cache);
        a.query_starts = pointer<std::int32_t>(query_starts), a.block_tables = pointer<std::int32_t>(block_tables);
        a.sequence_lengths = pointer<std::int32_t>(sequence_lengths), a.slots = pointer<std::int64_t>(slots);
        a.q_stride = q_stride, a.k_stride = k_stride, a.table_stride = table_stride, a.block_stride = block_stride;
        a.tokens = tokens, a.rows = rows, a.heads = heads, a.kv_heads = 1, a.dim = dim, a.value_dim = value_dim;
        a.block_size = block_size, a.type = static_cast<Type>(type), a.cache_type = static_cast<Type>(cache_type);
        a.scale = scale, a.window = INT32_MAX;
        a.layout = layout_of(1, dim, value_dim, block_size, a.cache_type);
        a.tails = {pointer(q_tail), pointer(k_tail), q_tail_stride, k_tail_stride};
        cpu.submit([&cpu, a, &kernels = attention_kernels(cpu.level)] { run_attention(cpu, a, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "The same for latents, whose queries and keys come in two parts: the elements that are values too, and the rest.");
  cpu.def(
      "gathered_scratch_bytes",
      [](const Cpu& cpu, int heads, int dim, int value_dim, int keys, int type) {
        const Attention a = gathered_attention(heads, 1, dim, value_dim, static_cast<Type>(type));
        return cpu.pool.threads() * gathered_bytes(a, attention_kernels(cpu.level), keys);
      },
      "Most bytes that `gathered_attention` works in, for queries that see up to `keys` vectors. Of keys and values, "
      "value_dim is 0, and `heads` are those of a head of keys.");
  cpu.def(
      "gathered_attention",
      [](Cpu& cpu, Address q, Address q_tail, Address out, Address query_starts, Address sequence_lengths, Address sinks,
         Address cache, Address tables, Address recent_cache, Address recent_tables, Address chosen, std::int64_t q_stride,
         std::int64_t q_tail_stride, std::int64_t table_stride, std::int64_t block_bytes, std::int64_t vector_bytes,
         std::int64_t recent_table_stride, std::int64_t recent_block_bytes, std::int64_t recent_bytes, int rate, int num_chosen,
         int window, int block_size, int tokens, int rows, int heads, int dim, int value_dim, int type, int key_type, float scale) {
        Attention a = gathered_attention(heads, 1, dim, value_dim, static_cast<Type>(type));
        a.q = pointer(q), a.out = pointer(out), a.sinks = pointer<float>(sinks), a.scale = scale;
        a.query_starts = pointer<std::int32_t>(query_starts), a.sequence_lengths = pointer<std::int32_t>(sequence_lengths);
        a.q_stride = q_stride, a.tokens = tokens, a.rows = rows;
        a.tails = {pointer(q_tail), nullptr, q_tail_stride, 0};
        const Gathered g{a,
                         {pointer<std::uint8_t>(cache), pointer<std::int32_t>(tables), table_stride, block_bytes, vector_bytes, rate},
                         {pointer<std::uint8_t>(recent_cache), pointer<std::int32_t>(recent_tables), recent_table_stride,
                          recent_block_bytes, recent_bytes, 1},
                         pointer<std::int32_t>(chosen), num_chosen, window, block_size, static_cast<Type>(key_type), 0};
        cpu.submit([&cpu, g, &kernels = attention_kernels(cpu.level)] { run_gathered(cpu, g, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Attend to vectors that each query sees of its own, and to its last tokens; see csrc/cpu/attention/gathered.h.");
  cpu.def(
      "chosen_keys_attention",
      [](Cpu& cpu, Address q, Address out, Address query_starts, Address sequence_lengths, Address cache, Address tables,
         Address chosen, std::int64_t q_stride, std::int64_t table_stride, std::int64_t block_bytes, std::int64_t token_bytes,
         int num_chosen, int block_size, int tokens, int rows, int heads, int kv_heads, int dim, int type, int key_type,
         float scale) {
        Attention a = gathered_attention(heads, kv_heads, dim, 0, static_cast<Type>(type));
        a.q = pointer(q), a.v = pointer(cache), a.out = pointer(out), a.scale = scale;
        a.query_starts = pointer<std::int32_t>(query_starts), a.sequence_lengths = pointer<std::int32_t>(sequence_lengths);
        a.q_stride = q_stride, a.tokens = tokens, a.rows = rows;
        const Gathered g{a,
                         {pointer<std::uint8_t>(cache), pointer<std::int32_t>(tables), table_stride, block_bytes, token_bytes, 1},
                         {},
                         pointer<std::int32_t>(chosen), num_chosen, 0, block_size, static_cast<Type>(key_type), token_bytes / 2};
        cpu.submit([&cpu, g, &kernels = attention_kernels(cpu.level)] { run_gathered(cpu, g, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "The same for keys and values that each query chose for all its heads: of each token the keys, then the values.");
  cpu.def(
      "relative_attention",
      [](Cpu& cpu, Address q, Address out, Address query_starts, Address sequence_lengths, Address cache, Address tables,
         Address factors, Address profiles, std::int64_t q_stride, std::int64_t factor_stride, std::int64_t table_stride,
         std::int64_t block_bytes, std::int64_t token_bytes, int rank, int extent, int block_size, int tokens, int rows,
         int heads, int kv_heads, int dim, int type, int key_type, float scale, int window) {
        Attention a = gathered_attention(heads, kv_heads, dim, 0, static_cast<Type>(type));
        a.q = pointer(q), a.v = pointer(cache), a.out = pointer(out), a.scale = scale, a.window = window;
        a.query_starts = pointer<std::int32_t>(query_starts), a.sequence_lengths = pointer<std::int32_t>(sequence_lengths);
        a.q_stride = q_stride, a.tokens = tokens, a.rows = rows;
        const Gathered g{a,
                         {pointer<std::uint8_t>(cache), pointer<std::int32_t>(tables), table_stride, block_bytes, token_bytes, 1},
                         {}, nullptr, 0, 0, block_size, static_cast<Type>(key_type), token_bytes / 2};
        const Profiles own{pointer(factors), pointer<float>(profiles), factor_stride, rank, extent};
        cpu.submit([&cpu, g, own, &kernels = attention_kernels(cpu.level)] { run_relative(cpu, g, own, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Attend to all keys, or to a window, with products of factors and profiles of distances; see Profiles.");
  cpu.def(
      "copy_blocks",
      [](Cpu& cpu, Address sources, Address targets, Address pairs, int planes, int count, std::int64_t block_bytes,
         std::int64_t block_stride) {
        copy_blocks(cpu, {pointer<std::int64_t>(sources), pointer<std::int64_t>(targets), pointer<std::int64_t>(pairs),
                          planes, count, block_bytes, block_stride});
      },
      nb::call_guard<nb::gil_scoped_release>(), "Copy whole blocks, in order, in every plane of every layer.");
}

}  // namespace octavo
