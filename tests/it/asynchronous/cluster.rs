//! A server whose databases have asynchronous connections.

use std::ops::Deref;

use workbench::ClusterBuilder;

use super::Database;

#[derive(Debug)]
pub(crate) struct Cluster(workbench::Cluster);

impl Cluster {
    pub(crate) fn start() -> Self {
        Self(workbench::Cluster::start())
    }

    pub(crate) fn builder() -> Builder {
        Builder(workbench::Cluster::builder())
    }

    pub(crate) fn standby(&self) -> Self {
        Self(self.0.standby())
    }

    pub(crate) fn database(&self) -> Database {
        Database(self.0.database())
    }
}

/// The rest is as for blocking connections.
impl Deref for Cluster {
    type Target = workbench::Cluster;

    fn deref(&self) -> &workbench::Cluster {
        &self.0
    }
}

#[derive(Debug)]
#[must_use]
pub(crate) struct Builder(ClusterBuilder);

impl Builder {
    pub(crate) fn setting(self, name: &str, value: &str) -> Self {
        Self(self.0.setting(name, value))
    }

    pub(crate) fn env(self, name: &str, value: &str) -> Self {
        Self(self.0.env(name, value))
    }

    pub(crate) fn german(self) -> Self {
        Self(self.0.german())
    }

    pub(crate) fn start(self) -> Cluster {
        Cluster(self.0.start())
    }
}
