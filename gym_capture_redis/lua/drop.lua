-- Retires exactly the snapshot that was consumed; a tombstone stays.
-- KEYS[1]  rollout
-- ARGV[1]  snapshot id
-- ARGV[2]  version
-- ARGV[3]  seconds that the tombstone stays
-- Reply    OK (retired, now or before) | STALE (another snapshot, newer, or never frozen)
-- Repeat   safe: OK
local state, err = load_state()
if err then return err end
if not state or state.status == 'open' or state.snapshot == ''
    or state.snapshot ~= ARGV[1] or string.format('%.0f', state.version) ~= ARGV[2] then
  return reply('STALE', state)
end
if state.status == 'frozen' then retire(state, ARGV[3]) end
return reply('OK', state)
