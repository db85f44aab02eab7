-- Marks the rollout incomplete: it lost a call.
-- 1  incarnation to give the rollout if it is new
-- 2  incarnation of the attempt that lost the call, or '' for whichever is there
-- 3  call, or '' for the rollout as a whole
-- 4  reason: marked (by its worker), lost (by the server, after it was acknowledged)
-- Reply    OK | RETIRED (also: another attempt)
-- Repeat   safe: marked all the same, at a higher version
local state, err = load_state()
if err then return err end
local expected = arg(2)
if state and state.status == 'retired' then return reply('RETIRED', state) end
if expected ~= '' and (not state or state.incarnation ~= expected) then return reply('RETIRED', state) end
state = state or new_state(arg(1))
mark_failure(state, arg(3), arg(4))
return reply('OK', state)
