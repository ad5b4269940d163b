// Groups of ranks as Python sees them. A recording that is active in the calling thread keeps the calls.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "../cpu/bindings.h"
#include "shared_group.h"

namespace octavo {
namespace {

using Group = std::shared_ptr<SharedGroup>;

void raise_engine_dead(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const GroupError& group_error) {
    PyErr_SetString(nb::module_::import_("octavo.errors").attr("EngineDeadError").ptr(), group_error.what());
  }
}

}  // namespace

void bind_collectives(nb::module_& m) {
  nb::register_exception_translator(raise_engine_dead);
  const nb::call_guard<nb::gil_scoped_release> without_gil;
  nb::class_<SharedGroup>(m, "SharedGroup", "One rank's side of a group that shares memory; tensors are addresses.")
      .def(
          "__init__",
          [](SharedGroup* group, int descriptor, std::size_t memory_bytes, std::size_t offset, int rank, int size,
             int first, int stride, double deadline_s, double spin_s) {
            new (group)
                SharedGroup(descriptor, memory_bytes, {offset, rank, size, first, stride}, deadline_s, spin_s);
          },
          nb::arg("descriptor"), nb::arg("memory_bytes"), nb::arg("offset"), nb::arg("rank"), nb::arg("size"),
          nb::arg("first"), nb::arg("stride"), nb::arg("deadline_s"), nb::arg("spin_s"))
      .def_static("head_bytes", &SharedGroup::head_bytes, "Bytes in front of all groups.")
      .def_static("group_bytes", &SharedGroup::group_bytes, nb::arg("size"), "Bytes of a group of so many ranks.")
      .def(
          "gather",
          [](Group group, Address share, std::size_t stride, Address out, std::size_t rows, std::size_t width) {
            make_recordable([=] { group->gather(pointer<char>(share), stride, pointer<char>(out), rows, width); });
          },
          without_gil, "Rows of `width` bytes from every rank, `stride` bytes apart, side by side.")
      .def(
          "sum",
          [](Group group, Address partial, std::size_t count, int type) {
            make_recordable([=] { group->sum(pointer<char>(partial), count, static_cast<SumType>(type)); });
          },
          without_gil, "Elementwise, in the order of ranks.")
      .def(
          "broadcast",
          [](Group group, Address data, std::size_t bytes, int source) {
            make_recordable([=] { group->broadcast(pointer<char>(data), bytes, source); });
          },
          without_gil, "Bytes of the source, to every rank.")
      .def(
          "send",
          [](Group group, Address data, std::size_t bytes, int target) {
            make_recordable([=] { group->send(pointer<char>(data), bytes, target); });
          },
          without_gil, "Bytes, to one rank.")
      .def(
          "receive",
          [](Group group, Address data, std::size_t bytes, int source) {
            make_recordable([=] { group->receive(pointer<char>(data), bytes, source); });
          },
          without_gil, "Bytes that one rank sent.")
      .def("poison", &SharedGroup::poison, nb::arg("reason"), without_gil,
           "Make waiting and later calls of all ranks raise EngineDeadError.");
}

}  // namespace octavo
