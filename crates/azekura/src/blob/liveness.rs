//! Which values of blob files are referenced: the sum of what tables say.

use std::collections::BTreeMap;

use crate::base::blob_ref::{Ordinals, References};
use crate::base::edit::FileId;

/// The referenced ordinals of logical files, over any number of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Liveness {
    files: BTreeMap<FileId, Ordinals>,
}

impl Liveness {
    /// Takes in what one more table refers to.
    pub(crate) fn add(&mut self, references: &References) {
        self.add_of(references, |_| true);
    }

    /// The same for the logical files that are `wanted`.
    pub(crate) fn add_of(&mut self, references: &References, wanted: impl Fn(FileId) -> bool) {
        for (logical, ordinals) in references.ordinals().filter(|(logical, _)| wanted(*logical)) {
            self.files.entry(logical).or_default().merge(ordinals);
        }
    }

    /// In ascending order.
    pub(crate) fn files(&self) -> impl Iterator<Item = (FileId, &Ordinals)> {
        self.files.iter().map(|(&logical, ordinals)| (logical, ordinals))
    }

    /// What is referenced of a logical file, if anything is.
    pub(crate) fn of(&self, logical: FileId) -> Option<&Ordinals> {
        self.files.get(&logical)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::blob_ref::{BlobRef, ReferenceBuilder};

    fn table(pointers: &[(u64, u32)]) -> References {
        let mut builder = ReferenceBuilder::default();
        for &(logical, ordinal) in pointers {
            builder.add(&BlobRef { logical: FileId(logical), ordinal, offset: 0, stored: 30, len: 9 });
        }
        builder.finish().unwrap()
    }

    #[test]
    fn tables_add_up() {
        let mut live = Liveness::default();
        live.add(&table(&[(1, 0), (1, 4), (2, 7)]));
        live.add(&table(&[(1, 2), (1, 1), (3, 0)]));
        let of = |logical| live.of(FileId(logical)).map(|ordinals| ordinals.iter().collect::<Vec<_>>());
        assert_eq!([of(1), of(2), of(3), of(4)], [Some(vec![0, 1, 2, 4]), Some(vec![7]), Some(vec![0]), None]);
    }
}
