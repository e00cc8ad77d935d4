//! Reading ahead: pieces of a file that follow each other come in few large reads.

/// The first read ahead, in bytes; each one after it is twice as long.
const FIRST: u64 = 16 << 10;

/// The longest; so much memory may a cursor hold for each file it is in.
const LONGEST: u64 = 256 << 10;

/// How many pieces must have followed each other before more than the next is read.
const PATIENCE: u32 = 2;

/// What one cursor has read of one file beyond the piece it stands on.
pub(crate) struct ReadAhead {
    /// Bytes of the file from `start`.
    bytes: Vec<u8>,
    start: u64,
    /// How many pieces have followed each other.
    in_a_row: u32,
    window: u64,
    /// Of the first read.
    first: u64,
    patience: u32,
}

/// What must be read before a piece is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Nothing: it is there.
    Nothing,
    /// The piece alone.
    Piece,
    /// So many bytes from its offset on, if the file is that long.
    Window(u64),
}

impl ReadAhead {
    /// For a cursor that may go anywhere: it reads ahead once pieces follow each other.
    pub(crate) fn adaptive() -> ReadAhead {
        ReadAhead { bytes: Vec::new(), start: 0, in_a_row: 0, window: FIRST, first: FIRST, patience: PATIENCE }
    }

    /// For one that reads the whole file, front to back: it reads ahead at once.
    pub(crate) fn eager() -> ReadAhead {
        ReadAhead { patience: 0, window: LONGEST, first: LONGEST, ..ReadAhead::adaptive() }
    }

    /// The cursor goes elsewhere: the next piece follows none.
    pub(crate) fn jump(&mut self) {
        (self.in_a_row, self.window) = (0, self.first);
        self.bytes = Vec::new();
    }

    /// The cursor comes to a piece, which follows the last one unless it has jumped, wherever it will find it.
    pub(crate) fn pass(&mut self) {
        self.in_a_row = self.in_a_row.saturating_add(1);
    }

    /// What is wanted for the piece at `offset`, which the cursor has just come to.
    pub(crate) fn wanted(&mut self, offset: u64, len: u64) -> Wanted {
        if self.piece(offset, len).is_some() {
            return Wanted::Nothing;
        }
        self.bytes = Vec::new();
        if self.in_a_row <= self.patience || len >= LONGEST {
            return Wanted::Piece;
        }
        let window = self.window.max(len);
        self.window = (2 * self.window).min(LONGEST);
        Wanted::Window(window)
    }

    /// Takes bytes of the file from `start`.
    pub(crate) fn fill(&mut self, start: u64, bytes: Vec<u8>) {
        (self.start, self.bytes) = (start, bytes);
    }

    /// The piece at `offset`, if all of it is here.
    pub(crate) fn piece(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let from = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        let to = from.checked_add(usize::try_from(len).ok()?)?;
        self.bytes.get(from..to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn come(ahead: &mut ReadAhead, offset: u64, len: u64) -> Wanted {
        ahead.pass();
        ahead.wanted(offset, len)
    }

    /// Reads blocks of 4 KiB one behind the other from `offset`; gives what was wanted for each.
    fn walk(ahead: &mut ReadAhead, offset: u64, count: u64) -> Vec<Wanted> {
        (0..count)
            .map(|i| {
                let at = offset + i * 4096;
                let wanted = come(ahead, at, 4096);
                if let Wanted::Window(len) = wanted {
                    ahead.fill(at, (0..len).map(|j| ((at + j) % 251) as u8).collect());
                }
                if let Some(frame) = ahead.piece(at, 4096) {
                    assert_eq!(frame.len(), 4096);
                    assert_eq!(frame[9], ((at + 9) % 251) as u8, "bytes of another place");
                }
                wanted
            })
            .collect()
    }

    #[test]
    fn reads_grow_while_blocks_follow_each_other() {
        let mut ahead = ReadAhead::adaptive();
        let wanted = walk(&mut ahead, 64, 300);
        assert_eq!(wanted[..3], [Wanted::Piece, Wanted::Piece, Wanted::Window(16 << 10)]);
        let windows: Vec<Wanted> = wanted.iter().copied().filter(|w| matches!(w, Wanted::Window(_))).collect();
        assert_eq!(windows[1..6], [32 << 10, 64 << 10, 128 << 10, 256 << 10, 256 << 10].map(Wanted::Window));
        assert!(windows.len() < 12, "{windows:?}");
    }

    #[test]
    fn a_jump_begins_anew() {
        let mut ahead = ReadAhead::adaptive();
        walk(&mut ahead, 64, 20);
        ahead.jump();
        assert_eq!(walk(&mut ahead, 1 << 30, 3), [Wanted::Piece, Wanted::Piece, Wanted::Window(16 << 10)]);
        ahead.jump();
        assert_eq!(come(&mut ahead, 0, 4096), Wanted::Piece);
        assert!(ahead.bytes.is_empty(), "memory is held for what will not be read");
    }

    #[test]
    fn the_whole_table_is_read_in_the_longest_reads() {
        let wanted = walk(&mut ReadAhead::eager(), 64, 128);
        assert_eq!(wanted.iter().filter(|w| **w == Wanted::Window(LONGEST)).count(), 2);
        assert!(wanted.iter().all(|w| *w != Wanted::Piece));
    }

    #[test]
    fn a_large_block_and_a_broken_handle_are_read_alone() {
        let mut ahead = ReadAhead::eager();
        assert_eq!(come(&mut ahead, 64, 1 << 20), Wanted::Piece);
        assert_eq!(come(&mut ahead, u64::MAX - 5, u64::MAX), Wanted::Piece);
        assert_eq!(ahead.piece(u64::MAX, u64::MAX), None);
    }
}
