//! Entries in one allocation, in the order of their arrival until they are sorted.

use crate::base::KeyOrder;
use crate::base::key::{KEY_LEN_MAX, VALUE_LEN_MAX};

/// Keys with their values. Used by one thread at a time.
#[derive(Debug, Default)]
pub(crate) struct EntryBuffer {
    /// The keys and values, each key followed by its value.
    bytes: Vec<u8>,
    spans: Vec<EntrySpan>,
}

/// Position of an entry in the bytes of the buffer.
#[derive(Clone, Copy, Debug)]
struct EntrySpan {
    /// The first eight bytes of the key as a number with the same order. Set by [`EntryBuffer::sort`].
    key_prefix: u64,
    start: usize,
    key_len: u32,
    value_len: u32,
}

impl EntryBuffer {
    /// Reserves address space for entries that use this many bytes of [memory](EntryBuffer::memory), whatever their
    /// lengths are. Memory is used only once it is filled; lists that grow would take up to twice as much.
    pub(crate) fn reserve(&mut self, bytes: usize) {
        // Without the reservations, the buffer grows as it is filled.
        let _reserved = self.bytes.try_reserve_exact(bytes);
        let _reserved = self.spans.try_reserve_exact(bytes / size_of::<EntrySpan>() + 1);
    }

    /// Adds an entry.
    #[inline]
    pub(crate) fn push(&mut self, key: &[u8], value: &[u8]) {
        debug_assert!(key.len() <= KEY_LEN_MAX && value.len() as u64 <= VALUE_LEN_MAX, "the lengths were checked");
        let start = self.bytes.len();
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        let (key_len, value_len) = (key.len() as u32, value.len() as u32);
        self.spans.push(EntrySpan { key_prefix: 0, start, key_len, value_len });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Bytes of memory that the entries use.
    #[inline]
    pub(crate) fn memory(&self) -> usize {
        self.bytes.len() + self.spans.len() * size_of::<EntrySpan>()
    }

    /// Memory that an entry of these lengths would use.
    pub(crate) fn entry_memory(key: &[u8], value: &[u8]) -> usize {
        key.len() + value.len() + size_of::<EntrySpan>()
    }

    /// Removes all entries, and frees memory beyond `kept_capacity` bytes.
    pub(crate) fn clear(&mut self, kept_capacity: usize) {
        self.bytes.clear();
        self.bytes.shrink_to(kept_capacity);
        self.spans.clear();
    }

    /// The key and the value of the entry at `index`.
    pub(crate) fn get(&self, index: usize) -> Option<(&[u8], &[u8])> {
        self.spans.get(index).map(|span| (span.key(&self.bytes), span.value(&self.bytes)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.spans.iter().map(|span| (span.key(&self.bytes), span.value(&self.bytes)))
    }

    /// Sorts the entries by key. Of entries with equal keys, only the one that was added last remains.
    pub(crate) fn sort(&mut self, order: &KeyOrder) {
        let bytes = &self.bytes;
        if order.is_bytewise() {
            self.spans.iter_mut().for_each(|span| span.key_prefix = key_prefix(span.key(bytes)));
        }
        self.spans.sort_unstable_by(|a, b| {
            let by_prefix = a.key_prefix.cmp(&b.key_prefix);
            // An entry without bytes begins where the next one does.
            let by_arrival = || (b.start, b.end()).cmp(&(a.start, a.end()));
            by_prefix.then_with(|| order.cmp(a.key(bytes), b.key(bytes))).then_with(by_arrival)
        });
        self.spans.dedup_by(|later, kept| {
            later.key_prefix == kept.key_prefix && order.cmp(later.key(bytes), kept.key(bytes)).is_eq()
        });
        debug_assert!(
            order.is_custom() || self.spans.is_sorted_by(|a, b| a.key(bytes) < b.key(bytes)),
            "each key is in the buffer once, in order"
        );
    }
}

impl EntrySpan {
    fn end(&self) -> usize {
        self.start + self.key_len as usize + self.value_len as usize
    }

    fn key<'b>(&self, bytes: &'b [u8]) -> &'b [u8] {
        &bytes[self.start..self.start + self.key_len as usize]
    }

    fn value<'b>(&self, bytes: &'b [u8]) -> &'b [u8] {
        let start = self.start + self.key_len as usize;
        &bytes[start..self.end()]
    }
}

/// Missing bytes are 0.
fn key_prefix(key: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let len = key.len().min(8);
    bytes[..len].copy_from_slice(&key[..len]);
    u64::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_entries_keep_the_last_of_equal_keys() {
        let mut buffer = EntryBuffer::default();
        for (key, value) in [("b", "1"), ("", "2"), ("b\0", "3"), ("b", "4"), ("aaaaaaaab", "5"), ("aaaaaaaaa", "6")] {
            buffer.push(key.as_bytes(), value.as_bytes());
        }
        buffer.sort(&KeyOrder::bytewise());
        let entries: Vec<(&[u8], &[u8])> = buffer.iter().collect();
        let expected = [("", "2"), ("aaaaaaaaa", "6"), ("aaaaaaaab", "5"), ("b", "4"), ("b\0", "3")];
        assert_eq!(entries, expected.map(|(key, value)| (key.as_bytes(), value.as_bytes())));
        assert!(buffer.memory() >= 5 * size_of::<EntrySpan>());
        buffer.clear(0);
        assert!(buffer.is_empty() && buffer.memory() == 0);
    }

    /// Regression: the list of positions grew as it was filled. For small entries, a bulk write took up to twice the
    /// memory that it was given, and more while the list was copied.
    #[test]
    fn reserved_buffer_does_not_grow() {
        const MEMORY: usize = 100 << 10;
        for len in [0, 1, 10, 1_000] {
            let mut buffer = EntryBuffer::default();
            buffer.reserve(MEMORY);
            let capacities = |buffer: &EntryBuffer| (buffer.bytes.capacity(), buffer.spans.capacity());
            let reserved = capacities(&buffer);
            let (key, value) = (vec![7; len], vec![8; len]);
            for _ in 0..2 {
                while buffer.memory() + EntryBuffer::entry_memory(&key, &value) <= MEMORY {
                    buffer.push(&key, &value);
                }
                assert_eq!(capacities(&buffer), reserved, "{len}");
                buffer.clear(MEMORY);
            }
        }
    }

    /// Regression: an empty value of the empty key has no bytes, so it could replace the next value of that key.
    #[test]
    fn last_value_of_the_empty_key_stays() {
        for values in [["", "1"], ["1", ""], ["", ""]] {
            let mut buffer = EntryBuffer::default();
            values.iter().for_each(|value| buffer.push(b"", value.as_bytes()));
            buffer.push(b"b", b"");
            buffer.sort(&KeyOrder::bytewise());
            let entries: Vec<(&[u8], &[u8])> = buffer.iter().collect();
            assert_eq!(entries, [(&b""[..], values[1].as_bytes()), (b"b", b"")], "{values:?}");
        }
    }
}
