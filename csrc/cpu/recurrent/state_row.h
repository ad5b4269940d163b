// Where a row reads its state from, and where it writes it.
#pragma once

#include "recurrent.h"

namespace octavo {
namespace {

// The tokens of one row of a step, and its states.
struct StateRow {
  const StateRows& all;
  const std::int32_t* table;
  int first_token, count, context;

  StateRow(const StateRows& rows, int row)
      : all(rows), table(rows.block_tables + row * rows.table_stride), first_token(rows.query_starts[row]),
        count(rows.query_starts[row + 1] - first_token), context(rows.sequence_lengths[row] - count) {}

  // The state that the row starts from, or null for zeros.
  const float* initial() const { return context == 0 ? nullptr : at(context - 1); }

  // How many of the tokens from `done` on, at most `most`, end before the next place where the state may be written.
  int run_length(int done, int most) const {
    const int left = all.block_size - (context + done) % all.block_size;
    const int length = left < count - done ? left : count - done;
    return length < most ? length : most;
  }

  // Where the state after `done` tokens is written, or null.
  float* target(int done) const {
    const int position = context + done - 1;
    if (done < count && (position + 1) % all.block_size != 0) return nullptr;
    return table[position / all.block_size] == 0 ? nullptr : at(position);
  }

  float* at(int position) const { return all.states + table[position / all.block_size] * all.block_stride; }
};

}  // namespace
}  // namespace octavo
