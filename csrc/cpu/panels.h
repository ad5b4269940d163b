// The layout of weights of linear layers, for every format: panels of 32 output columns, one after the other, each read
// along the inputs. A gated weight (gate stacked on up) has 16 columns of gate and the same 16 of up in a
// panel, so that one task has both factors of an output.
//
// Shared by units of every level and by the bindings: arithmetic only, always inlined, because the linker must
// not share the code of one level with another.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int kPanelColumns = 32;
constexpr int kTileColumns = 16;  // a panel is two tiles wide

// The columns of a weight [outputs, inputs] in panels.
struct PanelColumns {
  int outputs;
  bool gated;

  // Columns of the result, all and per panel.
  [[gnu::always_inline]] constexpr int results() const { return gated ? outputs / 2 : outputs; }
  [[gnu::always_inline]] constexpr int results_per_panel() const { return gated ? kTileColumns : kPanelColumns; }
  [[gnu::always_inline]] constexpr int panels() const { return (results() + results_per_panel() - 1) / results_per_panel(); }

  // Row of the plain weight that is column `column` of `panel`; -1 where there is none.
  [[gnu::always_inline]] constexpr int row_of(int panel, int column) const {
    const int result = panel * results_per_panel() + (gated ? column % kTileColumns : column);
    if (result >= results()) return -1;
    return gated && column >= kTileColumns ? results() + result : result;
  }

  // Where row `row` of the plain weight is: its panel times kPanelColumns, plus its column there.
  [[gnu::always_inline]] constexpr int place_of(int row) const {
    if (!gated) return row;
    const bool is_up = row >= results();
    const int result = is_up ? row - results() : row;
    return result / kTileColumns * kPanelColumns + result % kTileColumns + (is_up ? kTileColumns : 0);
  }
};

// Values that are added to a product's before its activation: [rows, outputs of the plain weight], rows `stride` apart.
struct Addend {
  const float* values;  // null where nothing is added
  std::int64_t stride;

  // Where `row` has the value of column `column` of `panel`.
  [[gnu::always_inline]] constexpr const float* at(const PanelColumns& columns, int row, int panel, int column) const {
    return values + row * stride + columns.row_of(panel, column);
  }
};

// Rows cut into blocks that are computed together: as few as can be, with numbers of rows that differ by one at most, or
// all but the last of the full size.
struct RowBlocks {
  int rows;
  int most;  // rows in a block
  bool even;

  [[gnu::always_inline]] constexpr int count() const { return (rows + most - 1) / most; }
  [[gnu::always_inline]] constexpr int start(int block) const {
    if (even) return static_cast<int>(static_cast<std::int64_t>(rows) * block / count());
    return block * most < rows ? block * most : rows;
  }
  [[gnu::always_inline]] constexpr int size(int block) const { return start(block + 1) - start(block); }
};

}  // namespace octavo
