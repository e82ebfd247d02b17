DELETE FROM resource_control.installed_migration WHERE version = '20000101000008';
DROP FUNCTION resource_control.set_token_base(boolean);
DROP VIEW resource_control.schedule_state;
DROP VIEW resource_control.leader;
DROP VIEW resource_control.rate_limit_state;
DROP VIEW resource_control.throttle_state;
DROP VIEW resource_control.slot_in_flight;
DROP VIEW resource_control.advisory_lock;
