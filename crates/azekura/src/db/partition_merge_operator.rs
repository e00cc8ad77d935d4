//! The merge operator of a partition.

use std::sync::{Arc, OnceLock};

use crate::base::merge_operator::{self, MergeOperator, shipped_operator};
use crate::base::{Error, Result};
use crate::db::components::PartitionComponents;

/// The merge operator of a partition. Thread safe.
pub(crate) struct PartitionMergeOperator {
    partition: Arc<str>,
    /// The name of the operator in the manifest, once there is one.
    stored: OnceLock<String>,
    /// The operator, once it is known. Its name is the stored one.
    operator: OnceLock<Arc<dyn MergeOperator>>,
}

impl PartitionMergeOperator {
    /// The operator with the name `stored` in the manifest. It is known if the crate has it.
    pub(crate) fn new(partition: Arc<str>, stored: Option<String>) -> PartitionMergeOperator {
        let shipped = stored.as_deref().and_then(shipped_operator);
        PartitionMergeOperator {
            partition,
            stored: stored.map_or_else(OnceLock::new, OnceLock::from),
            operator: shipped.map_or_else(OnceLock::new, OnceLock::from),
        }
    }

    /// Returns the operator.
    ///
    /// # Errors
    /// `Invalid` if the partition has none, or if it was not given yet.
    pub(crate) fn get(&self) -> Result<&Arc<dyn MergeOperator>> {
        self.operator.get().ok_or_else(|| self.missing_error())
    }

    /// Returns the operator, if it is known.
    pub(crate) fn if_known(&self) -> Option<&Arc<dyn MergeOperator>> {
        self.operator.get()
    }

    /// Checks that the operator, if there is one, is known.
    ///
    /// # Errors
    /// `Invalid` if it was not given yet.
    pub(crate) fn check_is_known(&self) -> Result<()> {
        if self.stored.get().is_some() { self.get().map(drop) } else { Ok(()) }
    }

    /// Checks an operand before it is written.
    ///
    /// # Errors
    /// `Invalid` if there is no operator or it refuses the operand.
    pub(crate) fn check_operand(&self, operand: &[u8]) -> Result<()> {
        merge_operator::check_operand(&**self.get()?, operand)
    }

    /// Returns the operator of `components` if its name must be stored first.
    ///
    /// # Errors
    /// `Invalid` if the partition has an operator, and `components` have none or another one.
    pub(crate) fn new_one<'a>(
        &self,
        components: &'a PartitionComponents,
    ) -> Result<Option<&'a Arc<dyn MergeOperator>>> {
        let given = components.merge_operator.as_ref();
        match (self.stored.get(), given) {
            (None, given) => Ok(given),
            (Some(stored), Some(given)) if stored == given.name() => Ok(None),
            (Some(stored), Some(given)) => Err(Error::invalid(format!(
                "partition {:?} has the merge operator {stored:?} and cannot be opened with {:?}",
                self.partition,
                given.name()
            ))),
            (Some(_), None) => Err(self.missing_error()),
        }
    }

    /// Sets the operator, whose name is in the manifest. Keeps one that was set before. Returns the one that is set.
    pub(crate) fn set(&self, operator: &Arc<dyn MergeOperator>) -> &Arc<dyn MergeOperator> {
        let stored = self.stored.get_or_init(|| operator.name().to_owned());
        debug_assert_eq!(stored, operator.name(), "the operator is the stored one");
        self.operator.get_or_init(|| Arc::clone(operator))
    }

    /// Takes over the name, which another process has stored in the manifest.
    pub(crate) fn note_stored(&self, name: &str) {
        let stored = self.stored.get_or_init(|| name.to_owned());
        if let Some(shipped) = shipped_operator(stored) {
            self.operator.get_or_init(|| shipped);
        }
    }

    #[cold]
    fn missing_error(&self) -> Error {
        Error::invalid(match self.stored.get() {
            Some(stored) => format!(
                "partition {:?} has the merge operator {stored:?}: open it with open_partition_with and this operator",
                self.partition
            ),
            None => format!("partition {:?} has no merge operator: open it with one", self.partition),
        })
    }
}
