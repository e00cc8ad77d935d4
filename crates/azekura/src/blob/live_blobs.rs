//! Which values of blob files are referenced: the sum of what tables say.

use std::collections::BTreeMap;

use crate::base::blob_pointer::{BlobReferences, OrdinalSet};
use crate::base::version_edit::FileNumber;

/// The referenced ordinals of logical files, over any number of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LiveBlobs {
    files: BTreeMap<FileNumber, OrdinalSet>,
}

impl LiveBlobs {
    /// Takes in what one more table refers to.
    pub(crate) fn add(&mut self, references: &BlobReferences) {
        self.add_files(references, |_| true);
    }

    /// The same for the logical files that are `wanted`.
    pub(crate) fn add_files(&mut self, references: &BlobReferences, wanted: impl Fn(FileNumber) -> bool) {
        for (logical, ordinals) in references.ordinals().filter(|(logical, _)| wanted(*logical)) {
            self.files.entry(logical).or_default().merge(ordinals);
        }
    }

    /// In ascending order.
    pub(crate) fn files(&self) -> impl Iterator<Item = (FileNumber, &OrdinalSet)> {
        self.files.iter().map(|(&logical, ordinals)| (logical, ordinals))
    }

    /// What is referenced of a logical file, if anything is.
    pub(crate) fn ordinals_of(&self, logical: FileNumber) -> Option<&OrdinalSet> {
        self.files.get(&logical)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::blob_pointer::{BlobPointer, BlobReferencesBuilder};

    fn table_references(pointers: &[(u64, u32)]) -> BlobReferences {
        let mut builder = BlobReferencesBuilder::default();
        for &(logical, ordinal) in pointers {
            builder.add(&BlobPointer {
                logical_file: FileNumber(logical),
                ordinal,
                frame_offset: 0,
                frame_len: 30,
                value_len: 9,
            });
        }
        builder.finish().unwrap()
    }

    #[test]
    fn references_of_tables_are_merged() {
        let mut live = LiveBlobs::default();
        live.add(&table_references(&[(1, 0), (1, 4), (2, 7)]));
        live.add(&table_references(&[(1, 2), (1, 1), (3, 0)]));
        let of = |logical| live.ordinals_of(FileNumber(logical)).map(|ordinals| ordinals.iter().collect::<Vec<_>>());
        assert_eq!([of(1), of(2), of(3), of(4)], [Some(vec![0, 1, 2, 4]), Some(vec![7]), Some(vec![0]), None]);
    }
}
