DELETE FROM resource_control.installed_migration WHERE version = '20000101000004';
DROP FUNCTION resource_control.prune_service_requests(interval, integer);
DROP FUNCTION resource_control.renew_service_request(bigint, interval);
DROP FUNCTION resource_control.complete_service_request(bigint);
DROP FUNCTION resource_control.claim_service_request(text, integer, interval, text);
DROP FUNCTION resource_control.admit_service_request(text, integer, interval, text);
DROP FUNCTION resource_control.lock_free_slot(text, integer);
DROP FUNCTION resource_control.service_request_lock(text, integer);
DROP TABLE resource_control.service_request;
